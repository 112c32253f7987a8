"""Complete the prompts of Parquet files with Ray Data, and continue after a crash where the run was.

    python examples/ray_data.py prompts/ answers/ --model Qwen/Qwen3-0.6B --workers 8

The input has the columns ``id``, unique, and ``prompt``. Run the command again to continue: Ray notes the ids of the
rows that are written in the folder ``--checkpoint``, and leaves them out. It deletes the notes once all rows are done.
"""

import argparse
from pathlib import Path

import ray
from ray.data.checkpoint import CheckpointConfig

from rosebatch.ray import Generator


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="Parquet file or folder, also s3:// and the like")
    parser.add_argument("output", help="folder of Parquet files")
    parser.add_argument("--model", required=True, help="hub id, or a path that all nodes have")
    parser.add_argument("--checkpoint", help="folder of what is done; default: OUTPUT.checkpoint")
    parser.add_argument("--address", help="of a Ray cluster; default: the one that Ray finds, or a local one")
    parser.add_argument("--workers", type=int, default=1, help="engines, each on a GPU of its own")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--block-rows", type=int, help="rows of a block: what is done is noted after each block")
    return parser.parse_args()


def main() -> None:
    """Read, generate, write."""
    args = parse_arguments()
    ray.init(args.address, include_dashboard=False)
    folder = args.checkpoint or f"{args.output.rstrip('/')}.checkpoint"
    if "://" not in folder:
        folder = str(Path(folder).resolve())
    context = ray.data.DataContext.get_current()
    context.checkpoint_config = CheckpointConfig(id_column="id", checkpoint_path=folder)
    prompts = ray.data.read_parquet(args.input)
    if args.block_rows:
        prompts = prompts.repartition(target_num_rows_per_block=args.block_rows)
    answers = prompts.map_batches(
        Generator,
        fn_constructor_kwargs={
            "model": args.model,
            "device": args.device,
            "sampling": {"max_tokens": args.max_tokens},
            "seed": 0,
        },
        batch_format="pyarrow",
        batch_size=args.batch_size,
        # An engine serves the rows of all batches under way together: give it several.
        max_concurrency=8,
        compute=ray.data.ActorPoolStrategy(size=args.workers, max_tasks_in_flight_per_actor=16),
        # A continued run also has an actor that filters rows. With a CPU for each, two CPUs had none left for tasks.
        num_cpus=0,
        num_gpus=0 if args.device == "cpu" else 1,
    )
    answers.write_parquet(args.output)


if __name__ == "__main__":
    main()
