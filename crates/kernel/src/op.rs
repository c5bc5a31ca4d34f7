//! What a fused operation is: one forward and one backward pass over some tensors.

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaStorage;
use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Storage, Tensor, bail, op::BackpropOp,
};

use super::cpu::{compact, par};

/// The result of an operation in its backward pass, where it reads that ([`FusedOp::needs_output`]).
pub type SavedOutput<'a> = Option<&'a Tensor>;

/// A fused operation. [`super::tape::apply`] runs it.
pub trait FusedOp: Send + Sync + 'static {
    /// What messages call it.
    fn name(&self) -> &'static str;

    /// The result for operands on the CPU.
    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)>;

    /// The result for operands on a CUDA device.
    #[cfg(feature = "cuda")]
    fn forward_cuda(&self, _operands: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape)> {
        bail!("there is no CUDA kernel for {}", self.name())
    }

    /// Whether the backward pass reads the result. If not, the memory of the result is free before it runs.
    fn needs_output(&self) -> bool {
        false
    }

    /// Gradients of the operands, where there are any, from the contiguous gradient of the result `out`, which is there if
    /// [`Self::needs_output`]. An operation has this or, where it adds to gradients, [`Self::backward_accumulate`]; the latter is what
    /// is called.
    fn backward(&self, _: &[&Tensor], _: SavedOutput, _: &Tensor) -> Result<Vec<Option<Tensor>>> {
        bail!("{} has no backward pass", self.name())
    }

    /// Operands whose gradients [`Self::backward_accumulate`] adds to what is there already.
    fn accumulates_into(&self) -> &'static [usize] {
        &[]
    }

    /// [`Self::backward`], where `held` has, in the order of [`Self::accumulates_into`], the gradient so far of each such operand, or
    /// nothing (an empty vector): what is given back for it is the sum.
    fn backward_accumulate(
        &self,
        operands: &[&Tensor],
        out: SavedOutput,
        grad: &Tensor,
        _held: Vec<Vec<f32>>,
    ) -> Result<Vec<Option<Tensor>>> {
        self.backward(operands, out, grad)
    }
}

/// The operands of an operation that takes exactly `N`.
pub fn operands<'a, const N: usize>(all: &[&'a Tensor]) -> Result<[&'a Tensor; N]> {
    match all.try_into() {
        Ok(all) => Ok(all),
        Err(_) => bail!("{} operands were given, not {N}", all.len()),
    }
}

/// The result of an operation that reads it in its backward pass.
pub fn result(out: Option<&Tensor>) -> Result<&Tensor> {
    out.ok_or_else(|| candle_core::Error::msg("the result of an operation is gone before its backward pass"))
}

/// The `N` gradients that an operation adds to; empty ones where nothing is held.
pub fn held<const N: usize>(held: Vec<Vec<f32>>) -> [Vec<f32>; N] {
    let mut held = held.into_iter();
    [(); N].map(|()| held.next().unwrap_or_default())
}

/// The gradient that is `held`, or zeros where none is.
pub fn begun(held: Vec<f32>, operand: &Tensor) -> Vec<f32> {
    if held.is_empty() { par::zeros(operand.elem_count()) } else { held }
}

/// Runs `op` outside of candle's graph.
pub fn run(op: &dyn FusedOp, operands: &[&Tensor]) -> Result<(Storage, Shape)> {
    operands.iter().try_for_each(|x| compact::expand(x))?;
    let guards: Vec<_> = operands.iter().map(|x| x.storage_and_layout()).collect();
    let mut on_cpu = Vec::with_capacity(guards.len());
    #[cfg(feature = "cuda")]
    let mut on_cuda = Vec::with_capacity(guards.len());
    for (storage, layout) in &guards {
        match &**storage {
            Storage::Cpu(storage) => on_cpu.push((storage, *layout)),
            #[cfg(feature = "cuda")]
            Storage::Cuda(storage) => on_cuda.push((storage, *layout)),
            _ => {}
        }
    }
    if on_cpu.len() == operands.len() {
        return op.forward(&on_cpu).map(|(out, shape)| (Storage::Cpu(CpuStorage::F32(out)), shape));
    }
    #[cfg(feature = "cuda")]
    if on_cuda.len() == operands.len() {
        return op.forward_cuda(&on_cuda).map(|(out, shape)| (Storage::Cuda(out), shape));
    }
    bail!("{} was given tensors of different devices, or of one without kernels", op.name())
}

/// An operation as a node of candle's graph.
struct Node<O>(O);

impl<O: FusedOp> Node<O> {
    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(CpuStorage, Shape)> {
        self.0.forward(operands).map(|(out, shape)| (CpuStorage::F32(out), shape))
    }

    fn backward<const N: usize>(
        &self,
        operands: [&Tensor; N],
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; N]> {
        let mut grads =
            self.0.backward_accumulate(&operands, Some(out), &grad.contiguous()?, Vec::new())?.into_iter();
        Ok(operands.map(|_| grads.next().flatten()))
    }
}

/// The result of `op` as a node of candle's graph. More than three operands are copied into one where a gradient is needed:
/// candle's operations take three at most. (The tape, which training uses, has no such limit.)
pub fn in_graph<O: FusedOp>(op: O, operands: &[&Tensor]) -> Result<Tensor> {
    match operands {
        [a] => a.apply_op1(Node(op)),
        [a, b] => a.apply_op2(b, Node(op)),
        [a, b, c] => a.apply_op3(b, c, Node(op)),
        [] => bail!("{} was given no operands", op.name()),
        many if many.iter().any(|x| x.track_op()) => {
            let shapes = many.iter().map(|x| x.shape().clone()).collect();
            let flat = many.iter().map(|x| x.flatten_all()).collect::<Result<Vec<_>>>()?;
            Tensor::cat(&flat, 0)?.apply_op1(Joined { op, shapes })
        }
        many => {
            let (storage, shape) = run(&op, many)?;
            Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), false))
        }
    }
}

/// A node with these operands as one of candle's operations.
macro_rules! node {
    ($operation:ident: $($x:ident $layout:ident),+ => $grads:ty) => {
        impl<O: FusedOp> $operation for Node<O> {
            fn name(&self) -> &'static str {
                self.0.name()
            }

            fn cpu_fwd(&self, $($x: &CpuStorage, $layout: &Layout),+) -> Result<(CpuStorage, Shape)> {
                self.forward(&[$(($x, $layout)),+])
            }

            #[cfg(feature = "cuda")]
            fn cuda_fwd(&self, $($x: &CudaStorage, $layout: &Layout),+) -> Result<(CudaStorage, Shape)> {
                self.0.forward_cuda(&[$(($x, $layout)),+])
            }

            fn bwd(&self, $($x: &Tensor,)+ out: &Tensor, grad: &Tensor) -> Result<$grads> {
                self.backward([$($x),+], out, grad).map(|[$($x),+]| ($($x),+))
            }
        }
    };
}

node!(CustomOp1: a la => Option<Tensor>);
node!(CustomOp2: a la, b lb => (Option<Tensor>, Option<Tensor>));
node!(CustomOp3: a la, b lb, c lc => (Option<Tensor>, Option<Tensor>, Option<Tensor>));

/// An operation whose operands, of these shapes, lie one after another in one tensor.
struct Joined<O> {
    op: O,
    shapes: Vec<Shape>,
}

impl<O> Joined<O> {
    /// The layouts of the operands.
    fn layouts(&self, first: usize) -> Vec<Layout> {
        let mut at = first;
        let layout = |shape: &Shape| {
            let layout = Layout::contiguous_with_offset(shape, at);
            at += shape.elem_count();
            layout
        };
        self.shapes.iter().map(layout).collect()
    }
}

impl<O: FusedOp> CustomOp1 for Joined<O> {
    fn name(&self) -> &'static str {
        self.op.name()
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let layouts = self.layouts(layout.start_offset());
        let operands: Vec<_> = layouts.iter().map(|layout| (storage, layout)).collect();
        self.op.forward(&operands).map(|(out, shape)| (CpuStorage::F32(out), shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let layouts = self.layouts(layout.start_offset());
        let operands: Vec<_> = layouts.iter().map(|layout| (storage, layout)).collect();
        self.op.forward_cuda(&operands)
    }

    fn bwd(&self, joined: &Tensor, out: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let part = |layout: &Layout| {
            let (at, shape) = (layout.start_offset(), layout.shape());
            joined.narrow(0, at, shape.elem_count())?.reshape(shape)
        };
        let operands = self.layouts(0).iter().map(part).collect::<Result<Vec<_>>>()?;
        let operands: Vec<&Tensor> = operands.iter().collect();
        let grads = self.op.backward_accumulate(&operands, Some(out), &grad.contiguous()?, Vec::new())?;
        let flat = |(grad, operand): (Option<Tensor>, &&Tensor)| match grad {
            Some(grad) => grad.flatten_all(),
            None => operand.zeros_like()?.flatten_all(),
        };
        let flat = grads.into_iter().zip(&operands).map(flat).collect::<Result<Vec<_>>>()?;
        Tensor::cat(&flat, 0).map(Some)
    }
}
