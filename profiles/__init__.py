"""What a model costs on a GPU type: recorded, measured, estimated, looked up."""

from tenuto.profiles.generation import Generation, StepCost, StepsAt
from tenuto.profiles.latency import Latency, LatencyTable, LinearLatency
from tenuto.profiles.profile import CoRun, CoRunPart, Fit, Measured, ModelProfile, Profile, ProfilePoint, Profiles

__all__ = [
    "CoRun",
    "CoRunPart",
    "Fit",
    "Generation",
    "Latency",
    "LatencyTable",
    "LinearLatency",
    "Measured",
    "ModelProfile",
    "Profile",
    "ProfilePoint",
    "Profiles",
    "StepCost",
    "StepsAt",
]
