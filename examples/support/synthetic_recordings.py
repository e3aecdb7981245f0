"""NWB files with simulated recordings, for offline_recordings.py: int16 counts at 30 kHz and an electrode table."""

import datetime
import os
from pathlib import Path

import numpy as np
import pynwb
from pynwb.ecephys import ElectricalSeries

from ezmsg.mlx import SimulatedAcquisitionSettings, simulated_acquisition
from ezmsg.mlx.simulate import MICROVOLTS_PER_COUNT


def write_recordings(folder: Path, count: int, n_channels: int, seconds: float) -> list[Path]:
    """Write recordings, as far as they are not there from an earlier call; their files."""
    unfinished = folder / "unfinished"
    unfinished.mkdir(parents=True, exist_ok=True)
    files = []
    for number in range(1, count + 1):
        file = folder / f"simulated-{n_channels}ch-{seconds:g}s-{number}.nwb"
        if not file.exists():
            _write(
                unfinished / file.name,
                SimulatedAcquisitionSettings(
                    duration=seconds, n_channels=n_channels, samples_per_message=15000, stall_every=0, seed=number
                ),
            )
            os.replace(unfinished / file.name, file)
        files.append(file)
    unfinished.rmdir()
    return files


def _write(file: Path, stream: SimulatedAcquisitionSettings) -> None:
    nwbfile = pynwb.NWBFile(
        session_description="a simulated recording from a microelectrode array",
        identifier=file.stem,
        session_start_time=datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc),
    )
    device = nwbfile.create_device(name="array", description="simulated")
    group = nwbfile.create_electrode_group(
        name="array", description="a row of electrodes", location="unknown", device=device
    )
    nwbfile.add_electrode_column(name="label", description="name of the channel")
    for number in range(1, stream.n_channels + 1):
        nwbfile.add_electrode(group=group, location="unknown", label=f"ch{number}")
    electrodes = nwbfile.create_electrode_table_region(
        region=list(range(stream.n_channels)), description="all electrodes"
    )
    # The file is made first and filled afterwards, so that no recording has to fit into memory.
    data = pynwb.H5DataIO(
        shape=(stream.n_samples, stream.n_channels),
        dtype=np.dtype(np.int16),
        chunks=(min(3000, stream.n_samples), stream.n_channels),
    )
    series = ElectricalSeries(
        name="ElectricalSeries",
        data=data,
        electrodes=electrodes,
        starting_time=0.0,
        rate=stream.sampling_rate,
        conversion=MICROVOLTS_PER_COUNT * 1e-6,
    )
    nwbfile.add_acquisition(series)
    with pynwb.NWBHDF5IO(str(file), "w") as io:
        io.write(nwbfile)
        done = 0
        for message in simulated_acquisition(stream):
            data.dataset[done : done + len(message.data)] = message.data
            done += len(message.data)
