"""Files of requests and their batches on disk: a database of SQLite (WAL) and, beside it, the contents of files.

An answer counts once the transaction that notes its line is committed, and a line is noted once. Of an output file only
the length that is committed counts: what a process wrote that was killed before it committed is cut off. So each line
is answered exactly once in the files, whoever dies. Everything blocks here. One process at a time has a store
(`BatchStore.lock`), and uses it from one thread.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import logging
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
from msgspec.structs import replace

from tenuto.deployments.serve.user_config import OfflineOptions
from tenuto.deployments.wire.status import OfflineStatus
from tenuto.documents import sync_folder
from tenuto.errors import EnvironmentFaultError

logger = logging.getLogger("ray.serve")

SPARE_BYTES = 64 << 20  # limit: of the disk that is left free: the database needs some to note what was done
_SLICE = 1000  # limit: lines that are looked at in one transaction, so that others have their turn
_MOST_LINE_BYTES = 5 << 20  # limit: of one line of a file; the JSON of a request may have 4 MiB
_SLICE_BYTES = 16 << 20  # limit: likewise
_MOST_ID = 512  # limit: characters of a custom_id
_MOST_OPEN = 100  # limit: batches of one key that are not over
_SCHEMA = """
CREATE TABLE IF NOT EXISTS documents (
    seq INTEGER PRIMARY KEY, id TEXT UNIQUE, key TEXT, kind TEXT, document TEXT, progress TEXT, is_open INTEGER);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT, number INTEGER, start INTEGER, length INTEGER, custom_id TEXT, is_answered INTEGER DEFAULT 0,
    PRIMARY KEY (batch, number)) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS custom_ids ON lines (batch, custom_id);
CREATE INDEX IF NOT EXISTS open_batches ON documents (is_open) WHERE is_open;
"""
_DAY_S = 86_400  # unit
_OLD = """
SELECT id, kind, document FROM documents WHERE NOT is_open AND :now >= IIF(kind = 'file',
    COALESCE(json_extract(document, '$.expires_at'), json_extract(document, '$.created_at') + :keep),
    COALESCE(json_extract(document, '$.completed_at'), json_extract(document, '$.failed_at'),
        json_extract(document, '$.cancelled_at'), json_extract(document, '$.expired_at')) + :keep)
    AND id NOT IN (SELECT json_extract(document, '$.input_file_id') FROM documents WHERE is_open) LIMIT :most
"""
_PAST = "past"  # format: id and kind of the document that has the counts of batches which are forgotten


class StoreError(Exception):
    """A question that the store refuses. `status`: that of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status, self.message = status, message


class BatchFile(msgspec.Struct):
    """A file, as OpenAI's interface shows it."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    object: str = "file"
    status: str = "processed"


class LineCounts(msgspec.Struct):
    """How many lines a batch has, and how many of these were answered, well or with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class OfflineBatch(msgspec.Struct, kw_only=True):
    """A batch, as OpenAI's interface shows it. Times are Unix times in s."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: str = "validating"
    object: str = "batch"
    errors: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: LineCounts = msgspec.field(default_factory=LineCounts)


class _Progress(msgspec.Struct):
    """How much of its file a batch has looked at (-1: all), and its answers so far."""

    output_id: str = msgspec.field(default_factory=lambda: new_id("file-"))
    error_id: str = msgspec.field(default_factory=lambda: new_id("file-"))
    looked_at: int = 0
    output_bytes: int = 0
    error_bytes: int = 0


class _Past(msgspec.Struct):
    """What stays of batches that are forgotten."""

    request_counts: LineCounts = msgspec.field(default_factory=LineCounts)


class BatchLine(NamedTuple):
    """A line that waits for its answer."""

    number: int
    custom_id: str
    request: bytes


class LineAnswer(NamedTuple):
    """The answer of a line, as it stands in the file of outputs or, unless it `is_ok`, in that of errors."""

    number: int
    is_ok: bool
    text: bytes


class RequestLine(msgspec.Struct):
    """A line of a file of requests."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    stream: bool = False


class _NamedLine(msgspec.Struct):
    custom_id: str | None = None


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess."""
    return prefix + secrets.token_hex(12)


def answer_text(custom_id: str | None, response: dict[str, Any] | None, code: str = "", message: str = "") -> bytes:
    """Return a line of OpenAI's files of outputs and errors."""
    error = {"code": code, "message": message} if code else None
    line = {"id": new_id("batch_req_"), "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


class BatchStore:
    """Invariant: a line is answered at most once, and every byte of an output file that counts is committed."""

    def __init__(
        self,
        options: OfflineOptions,
        *,
        clock: Callable[[], float] = time.time,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        """Take the folder of the store and its limits, a clock in Unix time, and what tells a disk's free bytes."""
        self.options = options
        self.folder = Path(options.path)
        self._clock, self._free_bytes = clock, free_bytes
        self._database: sqlite3.Connection | None = None
        self._inodes: list[int | None] = []  # of the database and its log
        self._locked: int | None = None

    # --- its life ---------------------------------------------------------------------------------------------------

    def lock(self) -> bool:
        """Take the store for this process; return False while another process has it. The lock ends with the process.

        Raises:
            OSError: the folder cannot be written.
        """
        if self._locked is None:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (self.folder / "files").mkdir(exist_ok=True, mode=0o700)
            self._locked = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.lockf(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock, children do not keep it
        except BlockingIOError:
            return False
        return True

    def open_database(self) -> None:
        """Open the database, and remove what uploads left that were not finished.

        Raises:
            EnvironmentFaultError: it cannot be used; says what to do.
            OSError: the folder cannot be written.
        """
        for unfinished in (self.folder / "files").glob("*.part"):
            unfinished.unlink()
        database = sqlite3.connect(self._path, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
            if (answer := database.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(answer)
            database.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            database.close()
            raise EnvironmentFaultError(
                f"{self._path} cannot be used ({error}). If the disk is full or read-only, mend that. If it is "
                "damaged, put a copy of it back, or move it away with its -wal and -shm: batches are then lost, and "
                "`files` beside it still has the content of every file."
            ) from error
        self._database, self._inodes = database, self._inodes_now()

    def check_database(self) -> None:
        """Write the database anew where somebody deleted it: what has it open still reads all of it.

        Raises:
            OSError, sqlite3.OperationalError: that is not possible now.
            EnvironmentFaultError: another database is in its place, which can be opened.
        """
        now = self._inodes_now()
        if now == self._inodes:
            return
        is_replaced = now[0] not in (None, self._inodes[0])
        if not is_replaced:
            if not self.folder.is_dir():
                raise FileNotFoundError(errno.ENOENT, "it is gone: make it again, with the folder `files`")
            with closing(sqlite3.connect(self._path.with_suffix(".new"))) as copy:
                self._db.backup(copy)
        self._close_database()
        if now[1] == self._inodes[1]:  # SQLite leaves the log of a database that is not there, and would read it
            for name in ("offline.db-wal", "offline.db-shm"):
                (self.folder / name).unlink(missing_ok=True)
        if is_replaced:
            raise EnvironmentFaultError(f"{self._path} was replaced while it was in use; it is to be opened anew")
        self._path.with_suffix(".new").rename(self._path)
        sync_folder(self.folder)
        logger.error("%s was deleted while it was in use, and was written anew", self._path)
        self.open_database()

    @property
    def _path(self) -> Path:
        return self.folder / "offline.db"

    def _inodes_now(self) -> list[int | None]:
        """Return which files are the database and its log, as far as they are there."""
        paths = (self._path, self.folder / "offline.db-wal")
        return [path.stat().st_ino if path.exists() else None for path in paths]

    def _close_database(self) -> None:
        if self._database is not None:
            self._database.close()
        self._database = None

    def close(self) -> None:
        """Close the database and let others have the store."""
        self._close_database()
        if self._locked is not None:
            os.close(self._locked)
        self._locked = None

    @property
    def is_open(self) -> bool:
        """Whether the database can be used."""
        return self._database is not None

    @property
    def _db(self) -> sqlite3.Connection:
        if self._database is None:
            raise StoreError(503, "the store of batches is not open. `tenuto status` says why, unless it is starting.")
        return self._database

    # --- documents --------------------------------------------------------------------------------------------------

    def document(self, key: str, kind: str, id: str) -> msgspec.Raw:
        """Return a `file` or a `batch` of a key in JSON; raises `StoreError` 404."""
        find = "SELECT document FROM documents WHERE id = ? AND key = ? AND kind = ?"
        row = self._db.execute(find, (id, key, kind)).fetchone()
        if row is None:
            raise StoreError(404, f"no {kind} '{id}' is here.")
        return msgspec.Raw(row[0])

    def documents(self, key: str, kind: str, after: str | None, most: int) -> list[tuple[str, msgspec.Raw]]:
        """Return ids and documents of a key, newest first, behind the one with the id `after`."""
        rows = self._db.execute(
            "SELECT id, document FROM documents WHERE key = ? AND kind = ? AND "
            "(? IS NULL OR seq < (SELECT seq FROM documents WHERE id = ?)) ORDER BY seq DESC LIMIT ?",
            (key, kind, after, after, most),
        )
        return [(id, msgspec.Raw(document)) for id, document in rows]

    def _add(
        self, key: str, kind: str, id: str, document: OfflineBatch | BatchFile, progress: _Progress | None
    ) -> None:
        row = (id, key, kind, _text(document), _text(progress), progress is not None)
        insert = "INSERT INTO documents (id, key, kind, document, progress, is_open) VALUES (?, ?, ?, ?, ?, ?)"
        self._db.execute(insert, row)

    # --- files ------------------------------------------------------------------------------------------------------

    def path(self, file_id: str) -> Path:
        """Return where the content of a file lies."""
        return self.folder / "files" / file_id

    def room_bytes(self, key: str) -> int:
        """Return how large a file of a key may be now.

        Raises:
            StoreError: 413 where the key holds all that it may, 507 where the disk is full.
        """
        return min(self._check_room(key, 1), self.options.max_file_mib << 20)

    def _check_room(self, key: str, size: int) -> int:
        """Return how many bytes there is room for beside what a key holds; raises `StoreError`, as `room_bytes`, where
        the key may not hold one more file of this size."""
        row: tuple[int, int] = self._db.execute(
            "SELECT COALESCE(SUM(kind = 'file'), 0), "
            "COALESCE(SUM(IIF(kind = 'file', json_extract(document, '$.bytes'), "
            "IIF(is_open, json_extract(progress, '$.output_bytes') + json_extract(progress, '$.error_bytes'), 0))), 0) "
            "FROM documents WHERE key = ?",
            (key,),
        ).fetchone()
        files, held = row
        if files >= self.options.max_files:
            raise StoreError(413, f"{files:,} files are here, and more are not allowed. Delete some.")
        allowed = (self.options.max_held_mib << 20) - held
        if allowed < size:
            raise StoreError(413, f"the files here hold {held >> 20} MiB, and more are not allowed. Delete some.")
        free = self._free_bytes(self.folder) - SPARE_BYTES
        if free <= 0:
            raise StoreError(507, "the disk is full. Delete files, or make room on the server.")
        return min(allowed, free)

    def copy_file(self, content: BinaryIO) -> str:
        """Copy a file here, and return the id that it may have; any thread may do so. Raises OSError if the disk is
        full."""
        file_id = new_id("file-")
        part, path = self.path(f"{file_id}.part"), self.path(file_id)
        try:
            with part.open("wb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
            sync_folder(path.parent)
        finally:
            part.unlink(missing_ok=True)
        return file_id

    def add_file(self, key: str, filename: str, file_id: str) -> msgspec.Raw:
        """Take a file that was copied here; if it cannot be noted, or others have taken the room meanwhile, it goes."""
        try:
            self._check_room(key, self.path(file_id).stat().st_size)
            with self._db:
                self._add_file(key, file_id, filename, "batch")
        except (StoreError, OSError, sqlite3.Error):
            self.path(file_id).unlink(missing_ok=True)
            raise
        return self.document(key, "file", file_id)

    def _add_file(self, key: str, file_id: str, filename: str, purpose: str) -> None:
        size, now = self.path(file_id).stat().st_size, int(self._clock())
        expires_at = now + self.options.keep_days * _DAY_S
        self._add(key, "file", file_id, BatchFile(file_id, size, now, filename, purpose, expires_at), None)

    def delete_file(self, key: str, file_id: str) -> None:
        """Delete a file of a key; raises `StoreError` 404, or 409 while a batch reads it."""
        self.document(key, "file", file_id)
        for batch_id, owner in self.open_batches():
            if owner == key and self._stored(batch_id)[0].input_file_id == file_id:
                raise StoreError(409, f"{batch_id} still reads this file. Cancel it, or wait until it is over.")
        self.path(file_id).unlink(missing_ok=True)
        with self._db:
            self._db.execute("DELETE FROM documents WHERE id = ?", (file_id,))

    def forget_old(self) -> bool:
        """Delete some of the files that have expired, unless a batch reads them, and of the batches that have been over
        for as long; return whether there may be more."""
        terms = {"now": int(self._clock()), "keep": self.options.keep_days * _DAY_S, "most": _SLICE}
        rows = self._db.execute(_OLD, terms).fetchall()
        past = self._db.execute("SELECT document FROM documents WHERE id = ?", (_PAST,)).fetchone()
        total = _Past() if past is None else msgspec.json.decode(past[0], type=_Past)
        for id, kind, document in rows:
            if kind == "file":
                self.path(id).unlink(missing_ok=True)
            else:
                counts = msgspec.json.decode(document, type=_Past).request_counts
                total.request_counts.completed += counts.completed
                total.request_counts.failed += counts.failed
        if rows:
            with self._db:
                self._db.executemany("DELETE FROM documents WHERE id = ?", [row[:1] for row in rows])
                write = "INSERT OR REPLACE INTO documents (id, kind, document, is_open) VALUES (?, ?, ?, 0)"
                self._db.execute(write, (_PAST, _PAST, _text(total)))
        return len(rows) == _SLICE

    # --- batches ----------------------------------------------------------------------------------------------------

    def add_batch(
        self, key: str, file_id: str, endpoint: str, window: str, window_s: int, metadata: dict[str, str] | None
    ) -> msgspec.Raw:
        """Begin a batch of the lines of a file of a key; raises `StoreError` 404, or 429 for too many batches."""
        self.document(key, "file", file_id)
        if [owner for _, owner in self.open_batches()].count(key) >= _MOST_OPEN:
            raise StoreError(429, f"{_MOST_OPEN} batches are not over yet. Wait for one of them, or cancel one.")
        now = int(self._clock())
        batch = OfflineBatch(
            id=new_id("batch_"),
            endpoint=endpoint,
            input_file_id=file_id,
            completion_window=window,
            created_at=now,
            expires_at=now + window_s,
            metadata=metadata,
        )
        with self._db:
            self._add(key, "batch", batch.id, batch, _Progress())
        return self.document(key, "batch", batch.id)

    def cancel(self, key: str, batch_id: str) -> msgspec.Raw:
        """Ask no more lines of a batch of a key; raises `StoreError` 404, or 409 for one that is over."""
        self.document(key, "batch", batch_id)
        batch, progress = self._stored(batch_id)
        if batch.status in ("validating", "in_progress"):
            with self._db:
                self._save(self._reach(batch, "cancelling"), progress)
        elif batch.status != "cancelling":
            raise StoreError(409, f"{batch_id} is {batch.status}, and not to be cancelled any more.")
        return self.document(key, "batch", batch_id)

    def open_batches(self) -> list[tuple[str, str]]:
        """Return ids and keys of the batches that are not over, oldest first."""
        return self._db.execute("SELECT id, key FROM documents WHERE is_open ORDER BY seq").fetchall()

    def _stored(self, batch_id: str) -> tuple[OfflineBatch, _Progress]:
        find = "SELECT document, progress FROM documents WHERE id = ?"
        document, progress = self._db.execute(find, (batch_id,)).fetchone()
        return msgspec.json.decode(document, type=OfflineBatch), msgspec.json.decode(progress, type=_Progress)

    def _save(self, batch: OfflineBatch, progress: _Progress, *, is_open: bool = True) -> None:
        row = (_text(batch), _text(progress), is_open, batch.id)
        self._db.execute("UPDATE documents SET document = ?, progress = ?, is_open = ? WHERE id = ?", row)

    def _reach(self, batch: OfflineBatch, status: str) -> OfflineBatch:
        return replace(batch, status=status, **{f"{status}_at": int(self._clock())})

    # --- lines ------------------------------------------------------------------------------------------------------

    def validate(self, batch_id: str) -> bool:
        """Look at the next lines of the file of a batch, and return whether more are to come. A line that is no
        request is answered with an error; a batch without any request fails."""
        with self._db:
            batch, progress = self._stored(batch_id)
            if progress.looked_at < 0 or self._has_no_content(batch):
                return False
            broken: list[LineAnswer] = []
            with self.path(batch.input_file_id).open("rb") as file:
                file.seek(progress.looked_at)
                is_over, end = False, progress.looked_at + _SLICE_BYTES
                for _ in range(_SLICE):
                    is_over = not self._take_line(file, batch, broken)
                    if is_over or file.tell() > end:
                        break
                progress.looked_at = -1 if is_over else file.tell()
            self._append(batch, progress, broken)
            counts, others = batch.request_counts, [self._stored(id)[0].request_counts for id in self._others(batch_id)]
            most, code, message = self.options.max_lines, "", ""
            if counts.total + sum(each.total for each in others) > most:
                code, message = "too_many_requests", f"the batches of this key have more than {most} lines. Send fewer."
            elif is_over and counts.failed == counts.total:
                code, message = "invalid_file", "no line of the file is a request; the file of errors says why."
            if code:
                batch.errors, progress.looked_at = _errors(code, message), -1
                self._end(batch, progress, "failed")
                return False
            if is_over and batch.status == "validating":
                batch = self._reach(batch, "in_progress")
            self._save(batch, progress)
            return not is_over

    def _has_no_content(self, batch: OfflineBatch) -> bool:
        """Whether somebody deleted the content of the file of a batch, and not the whole folder."""
        return not self.path(batch.input_file_id).exists() and (self.folder / "files").is_dir()

    def _note_lost_answers(self, batch: OfflineBatch, progress: _Progress) -> None:
        """Count no answers of a file that somebody deleted or cut, and let its batch fail: they cannot be written
        again."""
        for name in ("output", "error"):
            file, size = self.path(getattr(progress, f"{name}_id")), getattr(progress, f"{name}_bytes")
            if size and (not file.exists() or file.stat().st_size < size) and file.parent.is_dir():
                setattr(progress, f"{name}_bytes", 0)
                batch.errors = _errors("file_lost", "a file of its answers was deleted from the disk of the server.")

    def _others(self, batch_id: str) -> list[str]:
        """Return the other open batches of the key of a batch."""
        owners = dict(self.open_batches())
        return [id for id, key in owners.items() if key == owners[batch_id] and id != batch_id]

    def _take_line(self, file: BinaryIO, batch: OfflineBatch, broken: list[LineAnswer]) -> bool:
        """Look at the next line of a file; return False at its end."""
        start, raw = file.tell(), file.readline(_MOST_LINE_BYTES)
        if start == 0 and raw.startswith(codecs.BOM_UTF8):  # as some editors save texts
            start, raw = len(codecs.BOM_UTF8), raw.removeprefix(codecs.BOM_UTF8)
        rest = raw
        while rest and not rest.endswith(b"\n"):  # the last line, or one that is too long
            rest = file.readline(_MOST_LINE_BYTES)
        if raw.strip():
            number = batch.request_counts.total
            batch.request_counts.total += 1
            custom_id, code, message = _read(raw, batch.endpoint)
            insert = "INSERT OR IGNORE INTO lines (batch, number, start, length, custom_id) VALUES (?, ?, ?, ?, ?)"
            row = (batch.id, number, start, len(raw), custom_id)
            if not code and not self._db.execute(insert, row).rowcount:
                code, message = "duplicate_custom_id", f"a line before it has the custom_id '{custom_id}'"
            if code:
                text = answer_text(custom_id, None, code, f"line {number + 1}: {message}.")
                broken.append(LineAnswer(number, False, text))
        return bool(raw)

    def pending(self, batch_id: str, after: int, most: int) -> list[BatchLine] | None:
        """Return lines of a batch without an answer, in order and behind the line `after`; None where no more are to be
        asked, as the batch is over, cancelled or expired."""
        batch, progress = self._stored(batch_id)
        self._note_lost_answers(batch, progress)
        is_over = batch.status != "in_progress" or self._clock() >= batch.expires_at
        if is_over or batch.errors or self._has_no_content(batch):
            return None
        rows = self._db.execute(
            "SELECT number, custom_id, length, start FROM lines WHERE batch = ? AND number > ? AND NOT is_answered "
            "ORDER BY number LIMIT ?",
            (batch_id, after, most),
        ).fetchall()
        with self.path(batch.input_file_id).open("rb") as file:
            return [BatchLine(number, name, os.pread(file.fileno(), *place)) for number, name, *place in rows]

    def record(self, batch_id: str, answers: Sequence[LineAnswer]) -> None:
        """Keep the answers of lines; those of lines that have one already are dropped.

        Raises:
            OSError: the disk is full, as it says, or `sqlite3.OperationalError` does; nothing was kept.
        """
        with self._db:
            batch, progress = self._stored(batch_id)
            self._note_lost_answers(batch, progress)
            self._record(batch, progress, answers)

    def _record(self, batch: OfflineBatch, progress: _Progress, answers: Sequence[LineAnswer]) -> None:
        note = "UPDATE lines SET is_answered = 1 WHERE batch = ? AND number = ? AND NOT is_answered"
        new = [each for each in answers if self._db.execute(note, (batch.id, each.number)).rowcount]
        if new:  # a batch that is over has no lines any more
            self._append(batch, progress, new)
            self._save(batch, progress)

    def _append(self, batch: OfflineBatch, progress: _Progress, answers: Sequence[LineAnswer]) -> None:
        """Write answers behind what counts of the files, and count them."""
        if answers and self._free_bytes(self.folder) < SPARE_BYTES // 2:
            raise OSError(errno.ENOSPC, f"the disk is full: {SPARE_BYTES >> 21} MiB must be free")
        completed = [each.text for each in answers if each.is_ok]
        failed = [each.text for each in answers if not each.is_ok]
        progress.output_bytes = self._write(progress.output_id, progress.output_bytes, b"".join(completed))
        progress.error_bytes = self._write(progress.error_id, progress.error_bytes, b"".join(failed))
        batch.request_counts.completed += len(completed)
        batch.request_counts.failed += len(failed)

    def _write(self, file_id: str, length: int, data: bytes) -> int:
        if data:
            with os.fdopen(os.open(self.path(file_id), os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.truncate(length)  # what a process wrote that was killed before it committed
                file.seek(length)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if not length:
                sync_folder(self.path(file_id).parent)
        return length + len(data)

    def finish(self, batch_id: str) -> bool:
        """End a batch of which no more lines are asked: answer the next of those that have no answer with an error, and
        return whether more are to come. In the end its files are there."""
        with self._db:
            batch, progress = self._stored(batch_id)
            is_gone = self._has_no_content(batch)
            if batch.status not in ("in_progress", "cancelling") and not (is_gone and batch.status == "validating"):
                return False
            self._note_lost_answers(batch, progress)
            is_cancelled = batch.status == "cancelling"
            find = "SELECT number, custom_id FROM lines WHERE batch = ? AND NOT is_answered LIMIT ?"
            rows = self._db.execute(find, (batch_id, _SLICE)).fetchall()
            if is_gone and not is_cancelled and (rows or progress.looked_at >= 0):
                batch.errors = _errors("file_lost", "the content of its file was deleted from the disk of the server.")
            if rows:
                end = "was cancelled" if is_cancelled else "lost a file" if batch.errors else "expired"
                code = "file_lost" if batch.errors and not is_cancelled else f"batch_{end.split()[-1]}"
                message = f"the batch {end} before this line was asked."
                batch.expired_at = None if is_cancelled or batch.errors else int(self._clock())
                unasked = [LineAnswer(number, False, answer_text(name, None, code, message)) for number, name in rows]
                self._record(batch, progress, unasked)
                return True
            batch.finalizing_at = int(self._clock())
            uncancelled = "failed" if batch.errors else "expired" if batch.expired_at else "completed"
            self._end(batch, progress, "cancelled" if is_cancelled else uncancelled)
            return False

    def _end(self, batch: OfflineBatch, progress: _Progress, status: str) -> None:
        key = dict(self.open_batches())[batch.id]
        self._db.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))
        for file_id, size in ((progress.output_id, progress.output_bytes), (progress.error_id, progress.error_bytes)):
            if size:
                os.truncate(self.path(file_id), size)
                self._add_file(key, file_id, f"{batch.id}_{file_id}.jsonl", "batch_output")
        batch.output_file_id = progress.output_id if progress.output_bytes else None
        batch.error_file_id = progress.error_id if progress.error_bytes else None
        self._save(self._reach(batch, status), progress, is_open=False)

    # --- figures ----------------------------------------------------------------------------------------------------

    def status(self) -> OfflineStatus:
        """Return what the store holds, and what became of all lines."""
        each = ("$.bytes", "$.request_counts.completed", "$.request_counts.failed")
        sums = ", ".join("COALESCE(SUM(json_extract(document, ?)), 0)" for _ in each)
        size, completed, failed = self._db.execute(f"SELECT {sums} FROM documents", each).fetchone()
        counts = [self._stored(id)[0].request_counts for id, _ in self.open_batches()]
        waiting = sum(each.total - each.completed - each.failed for each in counts)
        return OfflineStatus(size, len(counts), waiting, completed, failed)


def _read(raw: bytes, endpoint: str) -> tuple[str | None, str, str]:
    """Return the custom_id of a line, and what is wrong with it: code and message, empty if nothing is."""
    if len(raw) >= _MOST_LINE_BYTES:
        return None, "line_too_long", f"it has more than {_MOST_LINE_BYTES >> 20} MiB"
    custom_id: str | None = None
    try:
        custom_id = msgspec.json.decode(raw, type=_NamedLine).custom_id
        line = msgspec.json.decode(raw, type=RequestLine)
        is_streamed = msgspec.json.decode(line.body, type=_Body).stream
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        is_json = isinstance(error, msgspec.ValidationError)
        return custom_id, "invalid_request" if is_json else "invalid_json_line", str(error).rstrip(".")
    if not 0 < len(line.custom_id) <= _MOST_ID:
        return None, "invalid_custom_id", f"its custom_id must have 1 to {_MOST_ID} characters"
    if line.method != "POST" or line.url != endpoint:
        return custom_id, "mismatched_url", f"its method and url are not POST and {endpoint}"
    return custom_id, "invalid_request" if is_streamed else "", "its body asks for a stream"


def _errors(code: str, message: str) -> dict[str, Any]:
    """Return what OpenAI's interface shows of a batch that fails."""
    return {"object": "list", "data": [{"code": code, "message": message, "param": None, "line": None}]}


def _text(document: msgspec.Struct | None) -> str:
    return msgspec.json.encode(document).decode()
