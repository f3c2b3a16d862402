"""Opens the store of a gallery, and checks that its vectors come from the encoder that is used with it."""

import re
from pathlib import Path

from nearkin.core import checks
from nearkin.gallery import migration, stored_as
from nearkin.gallery.items import Encoding
from nearkin.gallery.schema import Facts
from nearkin.gallery.stores import Store, hnsw
from nearkin.gallery.stores.postgres_connection import shown
from nearkin.gallery.stores.sqlite import SqliteStore
from nearkin.models.frozen import is_encoder_name

__all__ = ["describe_index", "existing_facts", "is_gallery", "open_store", "own_encoding", "run_fact", "run_of"]
__all__ += ["store_at"]


def is_gallery(place: str) -> bool:
    """Whether a text names a database, or a file of SQLite, rather than a source of items."""
    path = Path(place)
    if "://" in place or not path.is_file():
        return "://" in place
    with path.open("rb") as file:
        return file.read(15) == b"SQLite format 3"


def open_store(
    place: str | Path,
    run: str | Path | None,
    dim: int | None,
    create: bool,
    timeout: float,
    device: str,
    max_pixels: int,
    stored: str | None = None,
) -> tuple[Store, Facts, Encoding | None]:
    """See `Gallery.open`."""
    checks.positive("timeout", timeout)
    if dim is not None:
        checks.integer("dim", dim, 1)
    store = store_at(place, timeout)
    try:
        facts = store.facts()
        facts = None if facts is None else migration.migrate(store, facts)
        if dim is not None and facts is not None and dim != facts.dim:
            raise ValueError(f"{store.where}: has {facts.dim} dimensions, dim={dim} was asked for")
        encoding = None if run is None else Encoding(run, device, max_pixels, dim)
        if encoding is not None and facts is not None and facts.dim in encoding.info.lengths:
            encoding.shorten(facts.dim)  # the length of its vectors, without being told
        if facts is None:
            if not create:
                raise ValueError(
                    f"{store.where}: no such gallery; nearkin enrol RUN SOURCE --gallery {store.where} makes it"
                )
            new = _new_facts(store, encoding, dim)
            beyond = {} if stored is None else {"stored": stored_as.check_form(store, stored, new.dim)}
            store.create(new.replace(beyond=beyond))
            facts = store.facts()
            assert facts is not None
        elif stored is not None and facts.beyond.get("stored") != stored_as.check_form(store, stored, facts.dim):
            raise ValueError(
                f"{store.where}: is stored as {facts.beyond.get('stored') or 'rows in memory'}, stored={stored!r} was "
                f"asked for; change it with: nearkin gallery convert {store.where} --stored {stored}"
            )
        return store, _check_encoder(store, facts, encoding), encoding
    except BaseException:
        store.close()
        raise


def run_of(place: str | Path, timeout: float = 30.0) -> Path | str | None:
    """The run whose encoder a gallery was made with, or the encoder's name; None for a gallery of vectors."""
    store = store_at(place, timeout)
    try:
        return _own_run(store, existing_facts(store))
    finally:
        store.close()


def own_encoding(store: Store, facts: Facts, device: str, max_pixels: int) -> Encoding:
    """The encoder that made the rows of a gallery."""
    run = _own_run(store, facts)
    if run is None:
        raise ValueError(f"{store.where}: does not say which run made its rows; open it with run=RUN")
    encoding = Encoding(run, device, max_pixels)
    if facts.dim in encoding.info.lengths:
        encoding.shorten(facts.dim)
    _check_encoder(store, facts, encoding)
    return encoding


def _own_run(store: Store, facts: Facts) -> Path | str | None:
    if facts.run is None or is_encoder_name(facts.run):
        return facts.run
    if not Path(facts.run).is_dir():
        raise ValueError(
            f"{store.where}: its run is not at {facts.run} any more; pass its folder with --run RUN, in Python run=RUN"
        )
    return Path(facts.run)


def existing_facts(store: Store) -> Facts:
    """Of a gallery that exists; otherwise a ValueError."""
    facts = store.facts()
    if facts is None:
        raise ValueError(f"{store.where}: no such gallery; nearkin enrol RUN SOURCE --gallery {store.where} makes it")
    return migration.migrate(store, facts)


def describe_index(facts: Facts) -> str:
    """How a gallery is searched before it is warmed."""
    if stored := facts.beyond.get("stored"):
        return f"{stored} on disk, built at the first search"
    if facts.rows <= hnsw.EXACT:
        return f"exact, up to {hnsw.EXACT:,} rows"
    return "exact, until it is warmed (nearkin enrol, reindex and serve do)"


def _new_facts(store: Store, encoding: Encoding | None, dim: int | None) -> Facts:
    if encoding is None:
        if dim is None:
            raise ValueError(f"{store.where}: no such gallery; a new one needs run=RUN, or dim= for vectors")
        return Facts(dim)
    return Facts(encoding.dim, encoding.info.fingerprint, run_fact(encoding))


def run_fact(encoding: Encoding) -> str:
    """What a gallery keeps of its run: the folder, or the encoder's name, which any machine can make again."""
    return encoding.info.frozen or str(encoding.info.run.resolve())


def store_at(place: str | Path, timeout: float) -> Store:
    text = str(place)
    if text.startswith(("postgresql://", "postgres://")):
        from nearkin.gallery.stores.postgres import PostgresStore

        return PostgresStore(text, timeout)
    if "://" in text:
        raise ValueError(f"a gallery must be a file or postgresql://…, got {shown(text)}")
    if re.search(r"password\s*=", text):
        raise ValueError("a gallery in PostgreSQL is written postgresql://USER:PASSWORD@HOST/DATABASE")
    return SqliteStore(Path(place).expanduser(), timeout)


def _check_encoder(store: Store, facts: Facts, encoding: Encoding | None) -> Facts:
    """Raises where the vectors come from another encoder, unless the one that is used was trained to search them
    (`compatible.run` of a recipe); an empty gallery takes the one that is used."""
    if encoding is None or encoding.info.fingerprint == facts.fingerprint:
        return facts
    if facts.fingerprint is None and facts.rows == 0 and facts.dim == encoding.dim:
        store.adopt(encoding.info.fingerprint, run_fact(encoding))
        return store.facts() or facts
    if facts.fingerprint is not None and encoding.info.compatible == facts.fingerprint and facts.dim == encoding.dim:
        return facts
    if facts.fingerprint is None:
        raise ValueError(
            f"{store.where}: has vectors of an unknown encoder; open it without run=, or enrol into a new one"
        )
    source = facts.sources[-1] if facts.sources else "SOURCE"
    previous = f" ({facts.run})" if facts.run else ""
    raise ValueError(
        f"{store.where}: was made with another encoder{previous} than that of {encoding.info.shown}, and their "
        f"vectors cannot be compared; re-embed it with: nearkin enrol {encoding.info.shown} {source} "
        f"--gallery {_new_place(store)}; or keep its rows: nearkin gallery upgrade {store.where} --run "
        f"{encoding.info.shown}"
    )


def _new_place(store: Store) -> str:
    if store.kind != "sqlite":
        return store.where + ("&" if "?" in store.where else "?") + "gallery=NEW"
    path = Path(store.where)
    return str(path.with_name(f"{path.stem}-new{path.suffix}"))
