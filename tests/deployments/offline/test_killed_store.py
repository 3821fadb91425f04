"""A store whose process is killed by SIGKILL again and again: in the end each line has one answer."""

import subprocess
import sys
from pathlib import Path

from tests.deployments.offline.test_batch_store import begun, ended, lines_of, opened

LINES, KILLS = 200, 3
_STORE = """
import asyncio, sys
from concurrent.futures import ThreadPoolExecutor
from tenuto.deployments.offline.batch_runner import BatchRunner, LineReply
from tenuto.deployments.offline.batch_store import BatchStore
from tenuto.deployments.serve.user_config import OfflineOptions

async def ask(key, line):
    await asyncio.sleep(0)
    return LineReply(200, bytes(line.body))

async def main():
    store = BatchStore(OfflineOptions(path=sys.argv[1], under_way=8))
    assert store.lock()
    store.open_database()
    record = store.record

    def told(*arguments):
        record(*arguments)
        print("recorded", flush=True)

    store.record = told
    finish = store.finish

    def finished(*arguments):
        goes_on = finish(*arguments)
        print("recorded" if goes_on else "finished", flush=True)
        return goes_on

    store.finish = finished
    await BatchRunner(store, ThreadPoolExecutor(1), ask).run()

asyncio.run(main())
"""


def test_each_line_is_answered_once_however_often_the_process_is_killed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    batch_id = begun(store, lines_of(LINES))
    store.close()
    for kill in range(KILLS):
        with subprocess.Popen(
            [sys.executable, "-c", _STORE, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for _ in range(1 + kill % 3):
                assert process.stdout.readline() == "recorded\n"
            process.kill()
    store = opened(tmp_path)
    assert 0 < store.status().completed < LINES
    store.close()
    with subprocess.Popen([sys.executable, "-c", _STORE, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "finished\n":
            pass
        process.kill()
    store = opened(tmp_path)
    batch, outputs, errors = ended(store, batch_id)
    store.close()

    assert (batch["status"], errors) == ("completed", [])
    assert sorted(row["custom_id"] for row in outputs) == sorted(f"r{n}" for n in range(LINES))
    assert [row["response"]["body"] for row in outputs] == [{"n": 1}] * LINES
