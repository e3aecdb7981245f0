"""Small NWB files."""

import datetime
from pathlib import Path

import numpy as np

RATE = 2000.0
DATA = np.random.default_rng(0).integers(-3000, 3000, (1000, 3), dtype=np.int16)


def write(
    path: Path, *series: dict[str, object], labels: bool = True, spikes: bool = False, quiet: bool = False
) -> Path:
    """A file with an electrical series for each of the keyword arguments, on electrodes 2, 0 and 3 of 4.

    Args:
        path: The file.
        series: Arguments of ElectricalSeries, where those here do not fit; ``chunks`` for its data.
        labels: Whether the electrodes have labels.
        spikes: Whether there is a SpikeEventSeries named Spikes, too.
        quiet: Whether pynwb may not warn about shapes.
    """
    import warnings

    import pynwb

    file = pynwb.NWBFile(
        session_description="test",
        identifier="test",
        session_start_time=datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc),
    )
    device = file.create_device(name="device")
    group = file.create_electrode_group(name="group", description="", location="unknown", device=device)
    if labels:
        file.add_electrode_column(name="label", description="name")
    for number in range(4):
        file.add_electrode(group=group, location="unknown", **({"label": f"e{number}"} if labels else {}))

    def electrodes() -> object:
        return file.create_electrode_table_region(region=[2, 0, 3], description="some")

    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        for keywords in series:
            keywords = {"name": "Raw", "data": DATA, "conversion": 0.25e-6} | keywords
            if "timestamps" not in keywords:
                keywords = {"rate": RATE, "starting_time": 5.0} | keywords
            keywords["data"] = pynwb.H5DataIO(keywords["data"], chunks=keywords.pop("chunks", None))
            file.add_acquisition(pynwb.ecephys.ElectricalSeries(electrodes=electrodes(), **keywords))
        if spikes:
            data, stamps = np.zeros((5, 3, 30), np.int16), np.array([0.1, 0.2, 0.5, 0.6, 0.9])
            events = pynwb.ecephys.SpikeEventSeries(
                name="Spikes", data=data, timestamps=stamps, electrodes=electrodes()
            )
            file.add_acquisition(events)
        with pynwb.NWBHDF5IO(str(path), "w") as io:
            io.write(file)
    return path
