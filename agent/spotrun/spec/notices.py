"""Seconds between the notice of a machine's end and that end: what the clouds give, and what spotrun makes of it.

Sources: https://cloud.google.com/compute/docs/instances/spot#preemption-process and
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html.
"""

from __future__ import annotations

GCE_NOTICE = 30.0  # from Google's notice of a preemption to the end, unless the pool has the key `notice`
GCE_LONG_NOTICE = 120.0  # the only other notice that Google gives: a preview, since April 2026
EC2_NOTICE = 120.0  # from the notice of an EC2 spot interruption to the end
# How long before its known end a machine retires at the latest. It retires later if it lives only minutes. A notice
# that comes earlier counts from this moment on. The time is enough to drain, to upload a state of some gigabytes, and
# for a successor to begin to boot.
RETIRE_LEAD = 150.0
