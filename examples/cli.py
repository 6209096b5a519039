"""The same training from Lightning's command line and a YAML file.

python examples/cli.py fit --config examples/cli.yaml
"""

from char_gpt import CharGPT, PythonSource
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI


class CLI(LightningCLI):
    """Takes the size of the vocabulary from the data."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.num_characters", "model.num_characters", apply_on="instantiate")


if __name__ == "__main__":
    CLI(CharGPT, PythonSource, parser_kwargs={"parser_mode": "omegaconf"}, save_config_callback=None)
