"""The parts of `trainer.export`: the folders of sizes, their ONNX files, their cards, and the record of the export."""
