"""Checkpoints that are taken away under a run: it ends by itself, with a sentence for each."""

import pytest
from running import finish, start

PHASES = ("creating", "checksums", "blocked", "sampling", "writing")
# One process trains in each phase, and says what each came to behind what it wrote.
COMMAND = """
import os, sys
from jaxrl_llm.cli import main
*words, folder = sys.argv[1:]
for phase in PHASES:
    os.environ["PHASE"] = phase
    code = main([*words, os.path.join(os.path.dirname(folder), phase)])
    print(f"ended {phase} {code}", file=sys.stderr, flush=True)
""".replace("PHASES", repr(PHASES))
REMOVED = """
from jaxrl_llm.train.checkpoint import checkpoints, record

checkpoints._TURN_SECONDS = 0.5
PHASE = os.environ["PHASE"]
FOLDER = RUN.with_name(PHASE) / "checkpoints"
make, write = os.mkdir, record.write_record

def remove():
    shutil.rmtree(FOLDER, ignore_errors=True)
    if PHASE == "blocked":
        FOLDER.write_text("no folder")

def watch():
    while True:  # as soon as a save begins
        with contextlib.suppress(OSError):  # a folder that goes while it is read
            if any(FOLDER.glob("*unfinished*/*/*")):
                remove()

def making(path, *arguments, **options):
    make(path, *arguments, **options)
    if PHASE == os.environ["PHASE"] == "creating":
        if "unfinished" in os.path.basename(os.fspath(path)):
            os.rmdir(path)

def removing(folder, notes, *, step):
    if PHASE == os.environ["PHASE"] == "checksums":
        remove()
    write(folder, notes, step=step)

if PHASE == "writing":
    threading.Thread(target=watch, daemon=True).start()
os.mkdir, record.write_record = making, removing

def reward(prompt, completion, metadata):
    calls.append(prompt)
    if PHASE in ("sampling", "blocked") and len(calls) % 8 == 1:
        remove()
    return low_bytes(prompt, completion, metadata)

config = dataclasses.replace(
    CONFIG, reward=reward, steps=3, checkpoint=CheckpointConfig(every=1), prompts_per_step=4
)
"""


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_removed_ends(tmp_path):
    code, _, lines = finish(start(tmp_path, REMOVED, command=COMMAND), tmp_path)
    assert code == 0, lines
    others = [x for x in lines if not (x.startswith("jaxrl-llm") and "cannot be" in x)]
    assert [x.split()[1] for x in others] == list(PHASES), "\n".join(others)
    said, ended = [], {}
    for line in lines:
        if line in others:
            ended[line.split()[1]] = int(line.split()[2]), said
            said = []
        else:
            said.append(line)
    told = "The checkpoint of step {} cannot be written to "
    begins = [f"jaxrl-llm: warning: {told.format(step)}" for step in (1, 2)]
    begins.append(f"jaxrl-llm train: error: {told.format(3)}")
    for phase, (code, said) in ended.items():
        if phase in ("writing", "sampling"):  # which saves fail depends on time
            assert code == int(any("error" in line for line in said)), (phase, said)
        else:
            assert code == 1 and len(said) == 3, (phase, said)
            assert all(map(str.startswith, said, begins)), (phase, said)
