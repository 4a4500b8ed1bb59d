"""How many NVIDIA GPUs a machine type has, whole ones; a type that is not here is nobody's claim.

AWS: EC2's DescribeInstanceTypes (`GpuInfo`), which the tests hold the numbers against; for those of P3 that it does not
list any more https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-type-specifications.html.
GCP: https://cloud.google.com/compute/docs/accelerator-optimized-machines. GPUs attached to N1 are no part of the type.
"""

from __future__ import annotations

# family: sizes: GPUs.
_AWS: dict[str, dict[str, int]] = {
    "p3": {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8},
    "p3dn": {"24xlarge": 8},
    "p4d": {"24xlarge": 8},
    "p4de": {"24xlarge": 8},
    "p5": {"4xlarge": 1, "48xlarge": 8},
    "p5e": {"48xlarge": 8},
    "p5en": {"48xlarge": 8},
    "p6-b200": {"48xlarge": 8},
    "p6-b300": {"48xlarge": 8},
    "g4dn": {**dict.fromkeys(("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge"), 1), "12xlarge": 4, "metal": 8},
    "g5": {
        **dict.fromkeys(("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge"), 1),
        **{"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
    },
    "g5g": {**dict.fromkeys(("xlarge", "2xlarge", "4xlarge", "8xlarge"), 1), "16xlarge": 2, "metal": 2},
    "g6": {
        **dict.fromkeys(("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge"), 1),
        **{"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
    },
    "gr6": {"4xlarge": 1, "8xlarge": 1},
    "g6e": {
        **dict.fromkeys(("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge"), 1),
        **{"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
    },
    "g7": {"2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 2, "24xlarge": 4, "48xlarge": 8},
    "g7e": {"2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 2, "24xlarge": 4, "48xlarge": 8},
}
_GCP: dict[str, dict[str, int]] = {
    "a2-highgpu": {"1g": 1, "2g": 2, "4g": 4, "8g": 8},
    "a2-megagpu": {"16g": 16},
    "a2-ultragpu": {"1g": 1, "2g": 2, "4g": 4, "8g": 8},
    "a3-highgpu": {"1g": 1, "2g": 2, "4g": 4, "8g": 8},
    "a3-edgegpu": {"8g": 8},
    "a3-megagpu": {"8g": 8},
    "a3-ultragpu": {"8g": 8},
    "a4-highgpu": {"8g": 8},
    "a4x-highgpu": {"4g": 4},
    "g2-standard": {"4": 1, "8": 1, "12": 1, "16": 1, "24": 2, "32": 1, "48": 4, "96": 8},
    "g4-standard": {"48": 1, "96": 2, "192": 4, "384": 8},
}
TABLE: dict[str, int] = {
    **{f"{family}.{size}": count for family, sizes in _AWS.items() for size, count in sizes.items()},
    **{f"{family}-{size}": count for family, sizes in _GCP.items() for size, count in sizes.items()},
}
