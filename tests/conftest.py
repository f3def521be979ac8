import matplotlib, pytest, torch

matplotlib.use('agg')
torch.set_num_threads(1)  # the models are so small that threads only wait for each other

@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    "Whatever a test or a logger writes, it writes there"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('WANDB_SILENT', 'true')
    torch.manual_seed(0)
