# SPDX-License-Identifier: Apache-2.0
"""A store in a local directory: a file per document, replaced by rename.

Writers take turns by flock, so compare and set are one step; readers need no lock, because a file
is always one whole document. A lease is a lock on a file: the kernel gives it back when its holder
dies. Not for network file systems, whose locks and notifications are not these.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from fabric_agent.store import ConflictError, Document, StoreError, Value
from fabric_agent.store.readable import readable

FORMAT = 1
WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
SUFFIX = ".json"
RESERVED = ".store"  # a word that no key can be

# <sys/inotify.h>
IN_MOVED_TO = 0x80
IN_DELETE = 0x200
IN_Q_OVERFLOW = 0x4000
IN_NONBLOCK = 0o4000
IN_CLOEXEC = 0o2000000
EVENT = struct.Struct("iIII")

_libc = ctypes.CDLL(None, use_errno=True)


class DirectoryStore:
    """See ``Store``."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        with self._failures():
            (self.root / RESERVED).mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> Document | None:
        with self._failures():
            try:
                raw = self._path(key).read_bytes()
            except FileNotFoundError:
                return None
        return _document(key, raw)

    def put_if(self, key: str, value: Value | None, version: int) -> Document | None:
        path = self._path(key)
        with self._failures(), self._turn():
            current = self.get(key)
            if (current.version if current else 0) != version:
                raise ConflictError(
                    f"{key} was written by somebody else", hint="read it again and decide anew"
                )
            if value is None:
                path.unlink(missing_ok=True)
                return None
            path.parent.mkdir(exist_ok=True)
            document = Document(key, self._next_version(), value)
            self._replace(path, document)
            return document

    def list(self, prefix: str) -> tuple[Document, ...]:
        with self._failures():
            documents = [self.get(key) for key in self._keys(prefix)]
        return tuple(document for document in documents if document)

    def watch(self, prefix: str) -> DirectoryWatch:
        with self._failures():
            self._folder(prefix).mkdir(exist_ok=True)
            return DirectoryWatch(self, prefix, self._folder(prefix))

    def lease(self, name: str) -> FileLease | None:
        with self._failures():
            file = os.open(
                self.root / RESERVED / f"{_words(name, 1)[0]}.lease",
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
                0o600,
            )
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                return None
            return FileLease(file)

    def _keys(self, prefix: str) -> tuple[str, ...]:
        folder = self._folder(prefix)
        if not folder.is_dir():
            return ()
        names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))
        return tuple(f"{prefix}/{name.removesuffix(SUFFIX)}" for name in names)

    def _folder(self, prefix: str) -> Path:
        return self.root / _words(prefix, 1)[0]

    def _path(self, key: str) -> Path:
        folder, name = _words(key, 2)
        return self.root / folder / f"{name}{SUFFIX}"

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"store {self.root}: {error.strerror or error}",
                hint="see that the directory exists and may be written",
            ) from error

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Writers one after the other."""
        file = os.open(self.root / RESERVED / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def _next_version(self) -> int:
        """One count for all keys: a key that is removed and made again never repeats a version."""
        path = self.root / RESERVED / "version"
        version = 1 + (int(path.read_text()) if path.exists() else 0)
        _write(path, str(version).encode())
        return version

    def _replace(self, path: Path, document: Document) -> None:
        value = {"format": FORMAT, "version": document.version, "value": document.value}
        _write(path, json.dumps(value, separators=(",", ":")).encode())


class DirectoryWatch:
    """See ``Watch``."""

    def __init__(self, store: DirectoryStore, prefix: str, folder: Path) -> None:
        self._store = store
        self._prefix = prefix
        self._file = _checked(_libc.inotify_init1(IN_NONBLOCK | IN_CLOEXEC))
        mask = ctypes.c_uint32(IN_MOVED_TO | IN_DELETE)
        try:
            _checked(_libc.inotify_add_watch(self._file, os.fsencode(folder), mask))
        except OSError:
            os.close(self._file)
            raise

    def fileno(self) -> int:
        return self._file

    def changes(self, timeout: float | None = 0) -> frozenset[str]:
        if not readable([self._file], timeout):
            return frozenset()
        keys: set[str] = set()
        for mask, name in _events(os.read(self._file, 1 << 16)):
            if mask & IN_Q_OVERFLOW:
                keys.update(document.key for document in self._store.list(self._prefix))
            elif name.endswith(SUFFIX):
                keys.add(f"{self._prefix}/{name.removesuffix(SUFFIX)}")
        return frozenset(keys)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class FileLease:
    """See ``Lease``."""

    def __init__(self, file: int) -> None:
        self._file = file

    def held(self) -> bool:
        return self._file >= 0

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _document(key: str, raw: bytes) -> Document:
    try:
        content = json.loads(raw)
        written, version, value = content["format"], content["version"], content.get("value")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{key} is not a document", hint="remove the file, or restore it"
        ) from error
    if not isinstance(written, int) or written > FORMAT:
        raise StoreError(
            f"{key} was written by a newer version (format {written}, this one knows {FORMAT})",
            hint="upgrade this program",
        )
    if not isinstance(version, int) or not isinstance(value, dict):
        raise StoreError(f"{key} is not a document", hint="remove the file, or restore it")
    return Document(key, version, value)


def _words(key: str, count: int) -> list[str]:
    words = key.split("/")
    if len(words) != count or not all(map(WORD.fullmatch, words)):
        raise StoreError(
            f"{key!r} is not a key", hint="letters, digits, dots and dashes, such as nodes/host0"
        )
    return words


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _events(data: bytes) -> Iterator[tuple[int, str]]:
    offset = 0
    while offset < len(data):
        _, mask, _, length = EVENT.unpack_from(data, offset)
        offset += EVENT.size
        yield mask, os.fsdecode(data[offset : offset + length].rstrip(b"\0"))
        offset += length


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
