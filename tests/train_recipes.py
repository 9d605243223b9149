"""Train every recipe of a file, one after another: FILE, of folders and the fields of recipes."""

import json
import sys
from pathlib import Path

import finetune as ft
from finetune import catalog

for place, fields in json.loads(Path(sys.argv[1]).read_text()).items():
    ft.train(catalog.from_fields(fields), precision="fp32", output=place)
