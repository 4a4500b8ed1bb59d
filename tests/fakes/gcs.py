"""A Google Cloud Storage for tests: what obstore's client uses of its XML API, with preconditions, ranges, pages and
multipart uploads. Anything else is refused, and noted.

https://cloud.google.com/storage/docs/xml-api/reference-methods
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate, parsedate_to_datetime
from itertools import count
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import escape

from aiohttp import web

from tests.fakes.serving import DIRECT, Loop, serve

PAGE = 1000  # keys in one answer to a list, as on GCS
PART = 5 << 20  # bytes that each part of an upload has at least, but for the last
_BODY = 1 << 31
Guard = Callable[[web.Request, str, bool], bool]  # (what is asked, the key, whether it is there)
_LIST = {"list-type", "prefix", "delimiter", "continuation-token", "start-after", "max-keys"}


@dataclass(frozen=True)
class Object:
    data: bytes
    generation: int
    updated: float

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'

    def headers(self) -> dict[str, str]:
        return {
            "ETag": self.etag,
            "x-goog-generation": str(self.generation),
            "Last-Modified": formatdate(self.updated, usegmt=True),
            "Accept-Ranges": "bytes",
        }


@dataclass
class Upload:
    bucket: str
    key: str
    parts: dict[int, bytes] = field(default_factory=dict)


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str = "") -> None:
        self.status, self.code, self.message = status, code, message or code


class FakeGcs:
    """The buckets. endpoint, environment: for obstore, in this process or in others.

    refused: requests that this server does not know; leaving `running` raises if there is any. requests: method and
    path of each one that came in. guard: says whether a request is allowed; default: all are. slow: whether an object
    takes one write a second, as on GCS. s3: whether a request may say that the object must be new as S3 has it.
    """

    def __init__(self, slow: bool = False, s3: bool = False) -> None:
        self.endpoint = ""
        self.buckets: dict[str, dict[str, Object]] = {}
        self.uploads: dict[str, Upload] = {}
        self.refused: list[str] = []
        self.requests: list[tuple[str, str]] = []
        self.slow, self.s3 = slow, s3
        self.guard: Guard | None = None
        self._written: dict[tuple[str, str], float] = {}
        self._failures: list[int] = []
        self._generations = count(time.time_ns() // 1000)
        self._ids = count(1)
        self._loop: Loop | None = None

    @property
    def environment(self) -> dict[str, str]:
        """With these variables set, `gs://…` is here."""
        account = {
            "gcs_base_url": self.endpoint,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account), **DIRECT}

    def fail(self, *statuses: int) -> None:
        """Answer the next requests with these, without doing anything."""
        self._failures += statuses

    def keys(self, bucket: str) -> list[str]:
        return sorted(self.buckets[bucket])

    # HTTP.

    async def build(self) -> web.Application:
        app = web.Application(client_max_size=_BODY)
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        path = urlsplit(request.raw_path).path
        self.requests.append((request.method, unquote(path)))
        try:
            if self._failures:
                raise Refused(self._failures.pop(0), "SlowDown", "asked to fail")
            bucket, _, key = path.removeprefix("/").partition("/")
            bucket = unquote(bucket)
            if bucket not in self.buckets:
                raise Refused(404, "NoSuchBucket", f"The specified bucket does not exist: {bucket}")
            if not key and request.query.keys() == {"delete"}:
                return self._delete(bucket, request, body)
            if not self._allowed(bucket, request, unquote(key)):
                raise Refused(403, "AccessDenied", "the caller does not have access to the object")
            if not key:
                return self._list(bucket, request)
            return self._object(bucket, unquote(key), request, body)
        except Refused as error:
            if error.status == 501:
                self.refused.append(f"{request.method} {request.raw_path}: {error.message}")
            text = f"<Error><Code>{error.code}</Code><Message>{escape(error.message)}</Message></Error>"
            return web.Response(status=error.status, text="" if request.method == "HEAD" else _xml(text))

    def _object(self, bucket: str, key: str, request: web.Request, body: bytes) -> web.StreamResponse:
        query = frozenset(request.query)
        match (request.method, query):
            case ("GET" | "HEAD", _) if not query:
                return self._get(bucket, key, request)
            case ("PUT", _) if not query:
                return self._put(bucket, key, request.headers, body)
            case ("DELETE", _) if not query:
                self._check(self.buckets[bucket].get(key), request.headers)
                if self.buckets[bucket].pop(key, None) is None:
                    raise Refused(404, "NoSuchKey", f"The specified key does not exist: {key}")
                return web.Response(status=204)
            case ("POST", _) if query == {"uploads"}:
                identity = f"upload-{next(self._ids)}"
                self.uploads[identity] = Upload(bucket, key)
                return web.Response(text=_xml(_uploading(bucket, key, identity)))
            case ("PUT", _) if query == {"partNumber", "uploadId"}:
                part = Object(body, 0, 0.0)
                self._upload(bucket, key, request).parts[int(request.query["partNumber"])] = body
                return web.Response(headers={"ETag": part.etag})
            case ("POST", _) if query == {"uploadId"}:
                return self._complete(bucket, key, request, body)
            case ("DELETE", _) if query == {"uploadId"}:
                self._upload(bucket, key, request)
                del self.uploads[request.query["uploadId"]]
                return web.Response(status=204)
        raise Refused(501, "NotImplemented", "this server does not know that")

    def _allowed(self, bucket: str, request: web.Request, key: str) -> bool:
        return self.guard is None or self.guard(request, key, key in self.buckets[bucket])

    def _delete(self, bucket: str, request: web.Request, body: bytes) -> web.StreamResponse:
        """Several objects at once, as clients of S3 do. https://docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html"""
        text = ""
        for key in (element.text or "" for element in ET.fromstring(body).iter() if element.tag.endswith("Key")):
            if self._allowed(bucket, request, key):
                self.buckets[bucket].pop(key, None)
                text += f"<Deleted><Key>{escape(key)}</Key></Deleted>"
            else:
                text += f"<Error><Key>{escape(key)}</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
        return web.Response(text=_xml(f"<DeleteResult>{text}</DeleteResult>"))

    def _get(self, bucket: str, key: str, request: web.Request) -> web.StreamResponse:
        found = self.buckets[bucket].get(key)
        if found is None:
            raise Refused(404, "NoSuchKey", f"The specified key does not exist: {key}")
        headers = request.headers
        if "If-Match" in headers and headers["If-Match"].strip('"') != found.etag.strip('"'):
            raise Refused(412, "PreconditionFailed")
        if "If-None-Match" in headers and headers["If-None-Match"].strip('"') == found.etag.strip('"'):
            return web.Response(status=304, headers=found.headers())
        if {"If-Modified-Since", "If-Unmodified-Since"} & set(headers):
            raise Refused(501, "NotImplemented", "conditions on dates")
        status, data, more = 200, found.data, found.headers()
        if "Range" in headers:
            first, last = _range(headers["Range"], len(data))
            status, more["Content-Range"] = 206, f"bytes {first}-{last}/{len(data)}"
            data = data[first : last + 1]
        if request.method == "HEAD":
            return web.Response(status=status, headers={**more, "Content-Length": str(len(data))})
        return web.Response(status=status, headers=more, body=data, content_type="application/octet-stream")

    def _put(self, bucket: str, key: str, headers: Mapping[str, str], body: bytes) -> web.StreamResponse:
        self._check(self.buckets[bucket].get(key), headers)
        copied = headers.get("x-goog-copy-source")
        if copied is not None:
            source, _, name = unquote(copied).removeprefix("/").partition("/")
            if name not in self.buckets.get(source, {}):
                raise Refused(404, "NoSuchKey", f"The specified key does not exist: {copied}")
            body = self.buckets[source][name].data
        return web.Response(headers=self._write(bucket, key, body).headers())

    def _write(self, bucket: str, key: str, data: bytes) -> Object:
        now = time.time()
        if self.slow and now - self._written.get((bucket, key), 0.0) < 1.0:
            raise Refused(429, "SlowDown", "The object exceeded the rate limit for object mutation operations.")
        self._written[bucket, key] = now
        made = Object(data, next(self._generations), now)
        self.buckets[bucket][key] = made
        return made

    def _check(self, found: Object | None, headers: Mapping[str, str]) -> None:
        """Generation 0 is that of an object that is not there."""
        wanted = headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != (found.generation if found else 0):
            raise Refused(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold.")
        if self.s3 and headers.get("If-None-Match") == "*":
            if found:
                raise Refused(
                    412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold"
                )
        elif {"x-goog-if-metageneration-match", "If-Match", "If-None-Match"} & set(headers):
            raise Refused(501, "NotImplemented", "this condition")

    def _upload(self, bucket: str, key: str, request: web.Request) -> Upload:
        found = self.uploads.get(request.query["uploadId"])
        if found is None or (found.bucket, found.key) != (bucket, key):
            raise Refused(404, "NoSuchUpload")
        return found

    def _complete(self, bucket: str, key: str, request: web.Request, body: bytes) -> web.StreamResponse:
        upload = self._upload(bucket, key, request)
        self._check(self.buckets[bucket].get(key), request.headers)
        named = [(int(_text(each, "PartNumber")), _text(each, "ETag")) for each in ET.fromstring(body)]
        if not named or [number for number, _ in named] != sorted({number for number, _ in named}):
            raise Refused(400, "InvalidPartOrder")
        parts = [upload.parts.get(number, b"") for number, _ in named]
        for (number, etag), part in zip(named, parts, strict=True):
            if number not in upload.parts or etag.strip('"') != Object(part, 0, 0.0).etag.strip('"'):
                raise Refused(400, "InvalidPart", f"part {number}")
        if any(len(part) < PART for part in parts[:-1]):
            raise Refused(400, "EntityTooSmall", "a part of less than 5 MiB that is not the last")
        made = self._write(bucket, key, b"".join(parts))
        del self.uploads[request.query["uploadId"]]
        text = f"<CompleteMultipartUploadResult><ETag>{made.etag}</ETag></CompleteMultipartUploadResult>"
        return web.Response(text=_xml(text), headers={"x-goog-generation": str(made.generation)})

    def _list(self, bucket: str, request: web.Request) -> web.StreamResponse:
        query = request.query
        if request.method != "GET" or query.get("list-type") != "2" or not set(query) <= _LIST:
            raise Refused(501, "NotImplemented", "of a bucket, only its list (list-type=2) is here")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token", query.get("start-after", ""))
        limit = min(int(query.get("max-keys", PAGE)), PAGE)
        entries: dict[str, str] = {}  # what the answer has an entry for, in its order
        for key in sorted(self.buckets[bucket]):
            tail = key.removeprefix(prefix)
            folder = prefix + tail.partition(delimiter)[0] + delimiter if delimiter and delimiter in tail else ""
            if key.startswith(prefix) and (folder or key) > after:
                entries.setdefault(folder or key, folder)
        page = dict(list(entries.items())[:limit])
        text = "".join(self._entry(bucket, name, folder) for name, folder in page.items())
        more = len(entries) > len(page)
        token = f"<NextContinuationToken>{escape(list(page)[-1])}</NextContinuationToken>" if more else ""
        head = f"<IsTruncated>{str(more).lower()}</IsTruncated><KeyCount>{len(page)}</KeyCount>{token}"
        return web.Response(text=_xml(f"<ListBucketResult>{head}{text}</ListBucketResult>"))

    def _entry(self, bucket: str, name: str, folder: str) -> str:
        if folder:
            return f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
        found = self.buckets[bucket][name]
        when = parsedate_to_datetime(formatdate(found.updated, usegmt=True)).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        return (
            f"<Contents><Key>{escape(name)}</Key><Generation>{found.generation}</Generation><Size>{len(found.data)}</Size>"
            f"<LastModified>{when}</LastModified><ETag>{escape(found.etag)}</ETag></Contents>"
        )


@contextlib.contextmanager
def running(*buckets: str, slow: bool = False, s3: bool = False) -> Iterator[FakeGcs]:
    """Serve, with these buckets. slow, s3: as in `FakeGcs`.

    Raises at the end if something was asked that this server does not know.
    """
    fake = FakeGcs(slow, s3)
    fake.buckets = {name: {} for name in buckets}
    with serve(fake.build) as (fake._loop, fake.endpoint):
        yield fake
    assert not fake.refused, fake.refused


def _xml(text: str) -> str:
    return f'<?xml version="1.0" encoding="UTF-8"?>{text}'


def _uploading(bucket: str, key: str, identity: str) -> str:
    inner = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{identity}</UploadId>"
    return f"<InitiateMultipartUploadResult>{inner}</InitiateMultipartUploadResult>"


def _text(element: ET.Element, name: str) -> str:
    found = next((child for child in element if child.tag.rpartition("}")[2] == name), None)
    return (found.text or "") if found is not None else ""


def _range(header: str, size: int) -> tuple[int, int]:
    """First and last byte of `bytes=0-9`, `bytes=5-` or `bytes=-5`."""
    start, _, end = header.removeprefix("bytes=").partition("-")
    first = int(start) if start else max(0, size - int(end))
    last = min(int(end), size - 1) if start and end else size - 1
    if first > last:
        raise Refused(416, "InvalidRange")
    return first, last
