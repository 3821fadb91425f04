"""The profile file while models are measured. It is written after every point, so a stopped run loses at most one."""

from __future__ import annotations

from pathlib import Path

from tenuto.documents import check_target, unwritable, write_whole
from tenuto.errors import refused
from tenuto.profiles.measuring.events import Machine
from tenuto.profiles.measuring.measure import STOPPED, Measurement, MeasureRequest, assemble, largest_context
from tenuto.profiles.profile import ModelProfile, Profile, ProfilePoint


class ProfileWriter:
    """Collects what is measured. Invariant: the file on disk, once there is one, is complete and valid."""

    def __init__(self, path: Path | None, *, command: str, resume: bool = False) -> None:
        """Open the file.

        Args:
            path: where to write; None means profile-TYPE.yaml once the device is known.
            command: the command line, which is noted in the file.
            resume: keep the contents of the file, if it exists.

        Raises:
            InvalidInputError: resuming without a path, or the path cannot be written.
        """
        if resume and path is None:
            raise refused("--resume", "", "needs the file to continue", "Name it with -o FILE.")
        self._path = path
        self._command = command
        self._machine: Machine | None = None
        self.profile: Profile | None = None
        try:
            check_target(self.path)
        except OSError as error:
            raise unwritable("-o", self.path, error) from error
        self.profile = Profile.load(path) if resume and path is not None and path.exists() else None
        self._resumed = self.profile is not None

    @property
    def path(self) -> Path:
        """Where the profile is written."""
        return self._path or Path(f"profile-{self.profile.gpu_type if self.profile else 'gpu'}.yaml")

    def before(self, row: str, request: MeasureRequest) -> ModelProfile | None:
        """Return the row of a model in the resumed file.

        Raises:
            InvalidInputError: the row was measured with other options, so its points must not be mixed with new ones.
        """
        known = self.profile.models.get(row) if self._resumed and self.profile else None
        if known is None:
            return None
        network = (request.source, dict(request.options))
        if known.network is not None and (known.network, dict(known.options)) != network:
            raise refused(
                f"models.{row}",
                f"{known.network} {known.options}",
                f"was measured otherwise than asked for now ({request.source} {dict(request.options)})",
                "Use the same MODEL and --option, or write to another file.",
            )
        return known

    def machine(self, found: Machine) -> None:
        """Take note of the device; raises `InvalidInputError` if the resumed file is of another device."""
        self._machine = found
        if self.profile is None or not self._resumed:
            return
        kind, measured = self.profile.gpu_type, self.profile.measured
        if kind != found.gpu_type or (measured is not None and measured.hardware != found.hardware):
            raise refused(
                str(self.path),
                measured.hardware if measured else kind,
                f"is of another device than this one ({found.hardware})",
                "Write one file per device.",
            )

    def point(self, row: str, request: MeasureRequest, point: ProfilePoint) -> None:
        """Keep one point of a model that is not finished yet."""
        if self._machine is None:
            return
        known = self.profile.models.get(row) if self.profile else None
        points = (*(known.points if known else ()), point)
        partial = ModelProfile(
            points=tuple(sorted(points, key=lambda p: (-p.share_pct, p.batch_size))),
            network=request.source,
            options=dict(request.options),
            doubts=(STOPPED,),
            weights_mib=known.weights_mib if known else None,
        )
        self.finish(Measurement(row, partial, self._machine))

    def finish(self, measurement: Measurement) -> None:
        """Keep the measurement of a model instead of its points so far, and write the file."""
        made = assemble([measurement], name="measured", command=self._command)
        if self.profile is None:
            self.profile = made
        else:
            models = {**self.profile.models, measurement.name: measurement.profile}
            known = self.profile.coefficients
            context = largest_context([known.get("context_mib"), measurement.context_mib])
            update = {"models": models, "measured": made.measured, "coefficients": {**known, **context}}
            self.profile = self.profile.model_copy(update=update)
        self.write()

    def replace(self, profile: Profile) -> None:
        """Replace the profile and write the file."""
        self.profile = profile
        self.write()

    def write(self) -> None:
        """Write the file whole or not at all.

        Raises:
            InvalidInputError: the path cannot be written.
        """
        if self.profile is None:
            return
        path = self.path
        self.profile = self.profile.model_copy(update={"name": path.stem})
        try:
            write_whole(path, self.profile.dump())
        except OSError as error:
            raise unwritable("-o", path, error) from error
