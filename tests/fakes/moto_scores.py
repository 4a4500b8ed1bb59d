"""EC2's placement scores of spot machines, which moto lacks. `moto_extra` puts them behind its API.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_GetSpotPlacementScores.html
"""

from __future__ import annotations

from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.responses._base_response import EC2BaseResponse

SCORES: dict[str, int] = {}  # by zone; 5 where there is none
LIMIT = {"new": 10}  # how many configurations may still be new
ASKED: set[tuple[tuple[str, ...], int]] = set()  # configurations: types, and how many machines


class Scores(EC2BaseResponse):
    """Low for fewer than three types; what was asked before may be asked again, but new questions are limited."""

    def get_spot_placement_scores(self) -> ActionResult:
        types, size = tuple(self._get_param("InstanceTypes", [])), self._get_int_param("TargetCapacity")
        if (types, size) not in ASKED:
            if LIMIT["new"] <= 0:
                message = "You have exceeded your maximum allowed Spot placement configurations."
                raise EC2ClientError("MaxConfigLimitExceeded", message)
            LIMIT["new"] -= 1
            ASKED.add((types, size))
        found = [
            {
                "Region": self.region,
                "AvailabilityZoneId": zone.zone_id,
                "Score": SCORES.get(zone.name, 5) if len(types) >= 3 else 1,
            }
            for zone in self.ec2_backend.describe_availability_zones()
        ]
        return ActionResult({"SpotPlacementScores": found})
