"""Recordings: what earlier versions have written is opened, too."""

from __future__ import annotations

from pathlib import Path

import msgspec

from octavo.core.stats import EngineEvent, read_recording

#: As it was written before views named requests.
_OLD = """\
{"format":"octavo-recording","version":1,"title":"old"}
{"time":1.0,"replicas":[{"number":0,"status":"ready","open_requests":1,"restarts":0}],"views":[{"replica":0,"at":1.0,\
"token_budget":512,"max_num_seqs":64,"state":{"steps":1,"num_running":1},"blocks":[{"group":0,"on_host":false,\
"block_size":16,"window":null,"first":0,"num_blocks":2,"counts":[1,0,1,0,0],"runs":[[1,2,1,7,0,0],[1,0,0,-1,0,0]]}],\
"groups":[[7,"running",1,4,1,4,0,0.1,0,0,0,0,null]],"steps":[],"changes":[],"num_changes":0,"evicted_blocks":0}]}
"""


def test_a_recording_without_names_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text(_OLD)
    [line] = read_recording(path).splitlines()[1:]
    [view] = msgspec.json.decode(line, type=EngineEvent).views
    assert view.groups[0].group_id == 7 and view.request_ids == {}
