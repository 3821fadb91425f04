"""What the server said of its queue, and the requests' ids, in the files of a run."""

from pathlib import Path

import numpy as np
from pyarrow import parquet

from tenuto.loadgen.records import request_id, unsent
from tenuto.loadgen.run_files import write_run_files
from tenuto.loadgen.schedule import Schedule


def test_queue_lengths_and_ids_are_written(tmp_path: Path) -> None:
    times, models = np.array([100.0, 1200.0]), np.zeros(2, np.int32)
    schedule = Schedule(names=("m",), duration_s=2.0, times_ms=times, model_index=models)
    document = {"kind": "bench", "models": {"m": {}}, "options": {"duration_s": 2.0}}
    write_run_files(tmp_path, document, unsent(times, models), schedule, {1: 7})
    assert (tmp_path / "timeline.csv").read_text().splitlines() == [
        "second,offered,ok,late,expired,rejected,failed,queued",
        "0,1,0,0,0,0,1,",
        "1,1,0,0,0,0,1,7",
    ]
    ids = parquet.read_table(tmp_path / "requests.parquet")["id"].to_pylist()
    assert ids == [request_id(schedule.hash[:8], number) for number in range(2)]
