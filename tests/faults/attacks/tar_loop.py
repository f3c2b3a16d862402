"""A .tar with a member of size -512, or a name of -512 bytes (as CVE-2025-8194, where Python is not patched)."""

import os
import signal
import sys
import tarfile
import tempfile

from nearkin import data


def answer():
    try:
        return f"{len(data.load('a.tar', labelled=False))} pictures"
    except ValueError as error:
        return str(error)


def write(kind):
    good, member = tarfile.TarInfo("c/1.png"), tarfile.TarInfo("c/2.png")
    good.size, member.size, member.type = 512, -512, kind
    with open("a.tar", "wb") as file:
        file.write(good.tobuf(tarfile.GNU_FORMAT) + bytes(512) + member.tobuf(tarfile.GNU_FORMAT) + bytes(1024))


signal.alarm(60)  # listing it never ended, and memory grew
os.chdir(tempfile.mkdtemp())
answers = set()
for kind in (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE):
    write(kind)
    answers.add(answer())
print(*answers, sep="\n")
name = tarfile.TarInfo("././@LongLink")
name.size, name.type = 5, tarfile.GNUTYPE_LONGNAME
with open("a.tar", "wb") as file:  # names of names, which recursed without end
    file.write((name.tobuf(tarfile.GNU_FORMAT) + b"name".ljust(512, b"\0")) * 3000)
names = answer()
print(names)
sys.exit(
    "not a readable .tar archive" not in names
    or answers != {"a.tar: not a readable .tar archive (a header of -512 bytes)"}
)
