"""An hf: folder with code of its own (auto_map): the command asked whether to run it, and a y ran it. So of a run.

Nor are kernels fetched from a repository that its configuration names, and run.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from nearkin import models

if find_spec("transformers") is None:
    print("transformers is not installed")
    sys.exit(0)
os.environ["HF_HUB_OFFLINE"] = "1"
os.chdir(tempfile.mkdtemp())
os.makedirs("p/a")
CODE = {"AutoModel": "evil.Evil", "AutoConfig": "evil.C"}
VIT = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VIT |= {"intermediate_size": 16, "image_size": 32, "patch_size": 16}
FOLDERS = {
    "own": {"model_type": "evil", "auto_map": CODE},
    "vit": {**VIT, "auto_map": CODE},  # a model that transformers knows too
    "kernel": {**VIT, "attn_implementation": "evil/kernel"},
}
for name, config in FOLDERS.items():
    os.makedirs(name)
    Path(name, "config.json").write_text(json.dumps(config))
    Path(name, "evil.py").write_text(
        'open("PWNED", "w")\nfrom transformers import ViTConfig as C, ViTModel as Evil\nC.model_type = "evil"\n'
    )
good = True
for name in FOLDERS:
    done = subprocess.run(
        [sys.executable, "-m", "nearkin", "enrol", f"hf:{name}", "p", "--gallery", f"{name}.db"],
        input="y\ny\n",
        capture_output=True,
        text=True,
    )
    answer = (done.stdout + done.stderr).strip()
    print(name, done.returncode, answer)
    good &= done.returncode == 2 and "Traceback" not in answer and not os.path.exists("PWNED")
good &= "no code of a model is run" in answer

# A run whose encoder was such a folder: its configuration is in encoder.json.
encoder = models.build("hf:vit", pretrained=False, size=32, dim=4, pooling="avg", mean=[0.5] * 3, std=[0.5] * 3)
preparation = {"kind": "pictures", "size": 32, "stored": 32, "fit": "crop", "channels": 3, "flip": False}
models.save(encoder, "run", preparation)
description = json.loads(Path("run/encoder.json").read_text())
settings = description["settings"]
settings["config"] = settings["config"] | {"auto_map": CODE, "attn_implementation": "evil/kernel"}
Path("run/encoder.json").write_text(json.dumps(description))
try:
    models.load("run")
except ValueError as error:
    print("run:", error)
    good &= "no code of a model is run" in str(error) and "\n" not in str(error)
else:
    good = False
sys.exit(not (good and not os.path.exists("PWNED")))
