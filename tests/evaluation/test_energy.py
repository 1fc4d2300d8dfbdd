from t0repro.evaluation.energy import EnergyMeter


def write_package(powercap, name, microjoules, around=1000):
    folder = powercap / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text(f"{around}\n")


def test_joules_since_the_last_look_are_summed_over_packages(tmp_path):
    write_package(tmp_path, "intel-rapl:0", 5_000_000, 10_000_000)
    write_package(tmp_path, "intel-rapl:1", 1_000_000, 10_000_000)
    write_package(tmp_path, "intel-rapl:0:0", 4_000_000)  # a part of package 0
    meter = EnergyMeter(tmp_path, gpus=False)
    assert meter.source == "2 CPU packages (RAPL)"
    assert meter.joules() == 0.0
    write_package(tmp_path, "intel-rapl:0", 7_500_000, 10_000_000)
    write_package(tmp_path, "intel-rapl:0:0", 6_000_000)
    write_package(tmp_path, "intel-rapl:1", 1_250_000, 10_000_000)
    assert meter.joules() == 2.75
    assert meter.joules() == 0.0


def test_a_counter_that_begins_again_is_followed(tmp_path):
    write_package(tmp_path, "intel-rapl:0", 9_000_000, 10_000_000)
    meter = EnergyMeter(tmp_path, gpus=False)
    write_package(tmp_path, "intel-rapl:0", 500_000, 10_000_000)
    assert meter.joules() == 1.5


def test_a_machine_that_does_not_tell_gives_nothing(tmp_path):
    (tmp_path / "intel-rapl:0").mkdir()
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("")
    meter = EnergyMeter(tmp_path, gpus=False)
    assert meter.joules() is None and meter.source == ""
    assert EnergyMeter(tmp_path / "absent", gpus=False).joules() is None
