"""Train every recipe of a file, one after another: FILE, of folders and the fields of recipes."""

import json
import sys
from pathlib import Path

from accelerate.state import PartialState

import finetune as ft
from finetune import catalog
from finetune.training.run_options import Options

PartialState.destroy_process_group = lambda *_, **__: None  # the next training has the same group

for place, fields in json.loads(Path(sys.argv[1]).read_text()).items():
    options = Options(place, plot=False)
    ft.train(catalog.from_fields(fields), precision="fp32", options=options)
