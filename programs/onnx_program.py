"""effattn's shipped ONNX Runtime program: the mechanisms of torch_program.py, exported by torch.onnx, on the CPU. Inference only."""
import logging, math, time, warnings

import numpy, onnx, onnxruntime, onnxscript, torch

import effattn_program
from effattn_program import MECHANISMS, Encoder, Unsupported, call, chosen, unpack
import torch_program  # registers the mechanisms

logging.getLogger("torch.onnx").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


def session(module, inputs, threads):
    """`module` of named `inputs` as a session of ONNX Runtime."""
    module = module.eval()
    try:
        program = torch.onnx.export(module, tuple(inputs.values()), input_names=list(inputs), dynamo=True, verbose=False)
    except torch.onnx.errors.OnnxExporterError as error:
        reason = f"{type(error.__cause__ or error).__name__}: {error.__cause__ or error}".splitlines()[0]
        raise Unsupported(f"torch.onnx cannot export it ({reason[:100]})") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(session, inputs):
    inputs = {name: tensor.numpy() for name, tensor in inputs.items()}
    names = {one.name for one in session.get_inputs()}  # what the graph does not read is dropped
    return session.run(None, {name: value for name, value in inputs.items() if name in names})


class Call(torch.nn.Module):
    """A mechanism with its tensors as inputs, in the order of `names`."""

    def __init__(self, f, names, request):
        super().__init__()
        self.f, self.names, self.request = f, names, request

    def forward(self, *tensors):
        given = dict(zip(self.names, tensors))
        outputs = call(self.f, given, self.request["knobs"], self.request["causal"])
        return tuple(outputs[name] for name in self.request["outputs"] if outputs.get(name) is not None)


def evaluate(request, body, compiled):
    f = chosen(request)
    given = {name: tensor for name, tensor in unpack(body, "cpu").items() if not name.startswith("grad_")}
    with torch.no_grad():
        made = session(Call(f, list(given), request), given, torch.get_num_threads())
    outputs = run(made, given)
    return {}, {name: torch.from_numpy(value) for name, value in zip(request["outputs"], outputs)}


class Cell(effattn_program.Cell):
    """The encoder in a session of its own."""

    def __init__(self, request, body, compiled):
        if request["pass"] != "infer":
            raise Unsupported("ONNX Runtime only infers here")
        f = chosen(request)
        weights = unpack(body, "cpu")
        self.ids = weights.pop("ids").unbind(0)
        weights.pop("labels")
        self.device = torch.device("cpu")
        model = Encoder(f, request, weights)
        with torch.no_grad():
            self.session = session(model, {"ids": self.ids[0]}, request["threads"])
        self.next = 0

    def step(self):
        ids = {"ids": self.ids[self.next % len(self.ids)].numpy()}
        self.next += 1
        start = time.perf_counter()
        result, = self.session.run(None, ids)
        seconds = time.perf_counter() - start
        if not numpy.isfinite(result).all():
            raise ArithmeticError("the logits are not finite")
        return seconds, torch.from_numpy(result)

    def memory(self):
        raise Unsupported("the export takes more than a step does")


if __name__ == "__main__":
    for name, (f, knobs, causal, _) in MECHANISMS.items():
        MECHANISMS[name] = (f, knobs, causal, ["infer"])
    effattn_program.run(["f32"], devices=["cpu"], cell=Cell, evaluate=evaluate, version=f"onnxruntime {onnxruntime.__version__}")
