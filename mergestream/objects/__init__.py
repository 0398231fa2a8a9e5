"""Objects in a bucket: where files are that no path leads to, read by range and put whole."""

from mergestream.objects.address import Url, url_of
from mergestream.objects.bucket import Bucket
from mergestream.objects.cache import USUAL_SIZE, cache_in_use, cache_objects
from mergestream.objects.folder import Listing, Object, Objects
from mergestream.objects.neighbours import SMALL, Neighbours
from mergestream.objects.trying import fault, in_background, wait_for

__all__ = [
    "SMALL",
    "USUAL_SIZE",
    "Bucket",
    "Listing",
    "Neighbours",
    "Object",
    "Objects",
    "Url",
    "cache_in_use",
    "cache_objects",
    "fault",
    "in_background",
    "url_of",
    "wait_for",
]
