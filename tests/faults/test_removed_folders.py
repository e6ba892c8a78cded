"""Checkpoints that are taken away under a run: it ends by itself, with a sentence for each."""

import pytest
from running import finish, slow, start

REMOVED = """
from jaxrl_llm.train.checkpoint import checkpoints, record

checkpoints._TURN_SECONDS = 0.5
PHASE = "{phase}"
FOLDER = RUN / "checkpoints"

def remove():
    shutil.rmtree(FOLDER, ignore_errors=True)
    if PHASE == "blocked":
        FOLDER.write_text("no folder")

def watch():
    while True:  # as soon as a save begins
        with contextlib.suppress(OSError):  # a folder that goes while it is read
            if any(FOLDER.glob("*unfinished*/*/*")):
                remove()

if PHASE == "writing":
    threading.Thread(target=watch, daemon=True).start()
if PHASE == "creating":
    make = os.mkdir
    def making(path, *arguments, **options):
        make(path, *arguments, **options)
        if "unfinished" in os.path.basename(os.fspath(path)):
            os.rmdir(path)
    os.mkdir = making
if PHASE == "checksums":
    write = record.write_record
    def removing(folder, notes, *, step):
        remove()
        write(folder, notes, step=step)
    record.write_record = removing

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
@pytest.mark.parametrize(
    "phase", ["creating", *map(slow, ("writing", "checksums", "blocked", "sampling"))]
)
def test_a_run_whose_checkpoints_are_removed_ends(tmp_path, phase):
    code, _, lines = finish(start(tmp_path, REMOVED.replace("{phase}", phase)), tmp_path)
    others = [x for x in lines if not (x.startswith("jaxrl-llm") and "cannot be" in x)]
    assert not others, "\n".join(others)
    if phase in ("writing", "sampling"):  # which saves fail depends on time
        assert code == int(any("error" in line for line in lines)), lines
        return
    told = "The checkpoint of step {} cannot be written to "
    begins = [f"jaxrl-llm: warning: {told.format(step)}" for step in (1, 2)]
    begins.append(f"jaxrl-llm train: error: {told.format(3)}")
    assert code == 1 and len(lines) == 3, lines
    assert all(map(str.startswith, lines, begins)), lines
