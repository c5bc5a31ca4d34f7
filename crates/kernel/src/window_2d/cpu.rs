//! The CPU kernel: one square after another, its keys gathered, its logits in the cache and nowhere else.
//!
//! A job is a band of squares of one head: its queries lie side by side, and so do the gradients of the rows of keys that
//! it reaches, which are added up in the order of the bands.

use std::ops::Range;

use candle_core::{CpuStorage, DType, Device, Layout, Result, Shape, Tensor, bail};

use super::{Keys, Window2d, bias_rows, bias_rows_of, everywhere, key_side, reach};
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm};
use crate::cpu::jobs::build_jobs;
use crate::cpu::softmax::{softmax_rows, softmax_rows_backward};
use crate::cpu::{self, par};
use crate::op::{self, FusedOp, SavedOutput};
use crate::tape;
use effattn_record::pattern::Grid2d;

/// [`super::window_2d`] with a window.
pub fn window_2d(q: &Tensor, own: Keys, call: &Window2d) -> Result<Tensor> {
    let (b, h, n, d) = q.dims4()?;
    if own.k.dims() != q.dims() || own.v.dims() != q.dims() {
        bail!("keys {:?} and values {:?} for queries {:?}", own.k.dims(), own.v.dims(), q.dims());
    }
    // the keys of a head, then its values: [b, h, 2 (n + far), d]
    let (far, pair) = match call.everywhere.is_empty() {
        true => (0, Tensor::cat(&[own.k, own.v], 2)?),
        false => {
            let (k, v) = everywhere(&call.everywhere)?;
            (k.dim(2)?, Tensor::cat(&[own.k, &k, own.v, &v], 2)?)
        }
    };
    if pair.dims() != [b, h, 2 * (n + far), d] {
        bail!("keys and values {:?} for queries {:?}", pair.dims(), q.dims());
    }
    let table = match call.bias {
        Some(table) if table.dims() == [bias_rows(call.w), h] => table.t()?.contiguous()?, // [h, rows]
        Some(table) => bail!("a bias {:?} for a window of {} and {h} heads", table.dims(), call.w),
        None => Tensor::zeros((h, 0), DType::F32, &Device::Cpu)?,
    };
    let rows = call.bias.map_or(Vec::new(), |_| bias_rows_of(call.w));
    let op = Attend { grid: call.grid, w: call.w, far, heads: h, images: b, d, rows };
    tape::apply(&[&q.contiguous()?, &pair, &table], op)
}

struct Attend {
    grid: Grid2d,
    w: usize,
    /// Keys that every query sees, behind those of the image.
    far: usize,
    heads: usize,
    images: usize,
    d: usize,
    /// Row of the bias table for every query of a square and every key.
    rows: Vec<u32>,
}

/// The queries and keys of one square that are on the grid.
struct Square {
    /// Place on the grid and number within the square.
    queries: Vec<(usize, usize)>,
    keys: Vec<(usize, usize)>,
}

impl Attend {
    /// Bands per head.
    fn bands(&self) -> usize {
        self.grid.rows.div_ceil(self.w)
    }

    /// Rows of the grid that the queries of band `band` stand in.
    fn band(&self, band: usize) -> Range<usize> {
        band * self.w..((band + 1) * self.w).min(self.grid.rows)
    }

    /// Rows of the grid that they see.
    fn reached(&self, band: usize) -> Range<usize> {
        let s = reach(self.w);
        (band * self.w).saturating_sub(s)..((band + 1) * self.w + s).min(self.grid.rows)
    }

    /// Head and band of every job.
    fn jobs(&self) -> impl Iterator<Item = (usize, usize)> {
        let bands = self.bands();
        (0..self.images * self.heads * bands).map(move |job| (job / bands, job % bands))
    }

    fn square(&self, band: usize, column: usize) -> Square {
        let (w, s, wide) = (self.w, reach(self.w), key_side(self.w));
        let on_grid = |side: usize, back: usize| {
            (0..side * side).filter_map(move |at| {
                let y = (band * w + at / side).checked_sub(back).filter(|y| *y < self.grid.rows)?;
                let x = (column * w + at % side).checked_sub(back).filter(|x| *x < self.grid.cols)?;
                Some((y * self.grid.cols + x, at))
            })
        };
        Square { queries: on_grid(w, 0).collect(), keys: on_grid(wide, s).collect() }
    }

    /// Elements of a head's keys.
    fn span(&self) -> usize {
        (self.grid.len() + self.far) * self.d
    }

    /// Gathers the rows of `from` at `places`, then the ones behind the image.
    fn gather(&self, from: &[f32], places: &[(usize, usize)], far: bool, to: &mut Vec<f32>) {
        to.clear();
        for &(place, _) in places {
            to.extend_from_slice(&from[place * self.d..][..self.d]);
        }
        if far {
            to.extend_from_slice(&from[self.grid.len() * self.d..self.span()]);
        }
    }

    /// The weights of a square: softmax of q k^T + bias, row by row.
    fn weights(&self, square: &Square, table: &[f32], work: &mut Work) {
        let (queries, keys) = (square.queries.len(), square.keys.len() + self.far);
        work.p.resize(queries * keys, 0.0);
        let (q, k) = (Mat::new(&work.q, queries, self.d), Mat::new(&work.k, keys, self.d));
        gemm(MatMut::new(&mut work.p, queries, keys), q, k.t(), 1.0, Threads::One);
        let taps = key_side(self.w).pow(2);
        let biased = if table.is_empty() { 0 } else { queries };
        for (row, (_, query)) in work.p.chunks_exact_mut(keys).zip(&square.queries).take(biased) {
            let entries = &self.rows[query * taps..][..taps];
            for (logit, (_, key)) in row.iter_mut().zip(&square.keys) {
                *logit += table[entries[*key] as usize];
            }
        }
        softmax_rows(&mut work.p, keys);
    }

    fn attend(&self, q: &[f32], pair: &[f32], table: &[f32]) -> Vec<f32> {
        let (d, span) = (self.d, self.span());
        let jobs: Vec<(usize, usize)> = self.jobs().collect();
        let lens: Vec<usize> =
            jobs.iter().map(|(_, band)| self.band(*band).len() * self.grid.cols * d).collect();
        let [out] = build_jobs([&lens], Work::default, |work, job, [out]| {
            let (head, band) = jobs[job];
            let table = self.table(table, head);
            let q = &q[head * self.grid.len() * d..];
            let (k, v) = pair[2 * head * span..].split_at(span);
            let first = self.band(band).start * self.grid.cols;
            for column in 0..self.grid.cols.div_ceil(self.w) {
                let square = self.square(band, column);
                self.gather(q, &square.queries, false, &mut work.q);
                self.gather(k, &square.keys, true, &mut work.k);
                self.gather(v, &square.keys, true, &mut work.v);
                self.weights(&square, table, work);
                let (queries, keys) = (square.queries.len(), square.keys.len() + self.far);
                work.y.resize(queries * d, 0.0);
                let (p, v) = (Mat::new(&work.p, queries, keys), Mat::new(&work.v, keys, d));
                gemm(MatMut::new(&mut work.y, queries, d), p, v, 1.0, Threads::One);
                for ((place, _), y) in square.queries.iter().zip(work.y.chunks_exact(d)) {
                    out[(place - first) * d..][..d].copy_from_slice(y);
                }
            }
        });
        out
    }

    /// The bias of head `head`.
    fn table<'a>(&self, table: &'a [f32], head: usize) -> &'a [f32] {
        let rows = table.len() / self.heads;
        &table[head % self.heads * rows..][..rows]
    }

    /// Gradients of q, of keys and values, and of the table.
    fn gradients(&self, q: &[f32], pair: &[f32], table: &[f32], dy: &[f32]) -> [Vec<f32>; 3] {
        let (d, span) = (self.d, self.span());
        let (cols, rows) = (self.grid.cols, table.len() / self.heads);
        let jobs: Vec<(usize, usize)> = self.jobs().collect();
        let queries: Vec<usize> = jobs.iter().map(|(_, band)| self.band(*band).len() * cols * d).collect();
        let keys: Vec<usize> =
            jobs.iter().map(|(_, band)| 2 * (self.reached(*band).len() * cols + self.far) * d).collect();
        let tables = vec![rows; jobs.len()];
        let [dq, parts, dtables] =
            build_jobs([&queries, &keys, &tables], Work::default, |work, job, [dq, dkv, dtable]| {
                let (head, band) = jobs[job];
                let table = self.table(table, head);
                let (q, dy) = (&q[head * self.grid.len() * d..], &dy[head * self.grid.len() * d..]);
                let (k, v) = pair[2 * head * span..].split_at(span);
                for column in 0..cols.div_ceil(self.w) {
                    let square = self.square(band, column);
                    self.gather(q, &square.queries, false, &mut work.q);
                    self.gather(dy, &square.queries, false, &mut work.y);
                    self.gather(k, &square.keys, true, &mut work.k);
                    self.gather(v, &square.keys, true, &mut work.v);
                    self.weights(&square, table, work);
                    self.square_backward(&square, band, work, (&mut *dq, &mut *dkv, &mut *dtable));
                }
            });
        (dq, self.sum_bands(&jobs, &keys, &parts), self.sum_tables(rows, &dtables)).into()
    }

    fn square_backward(
        &self,
        square: &Square,
        band: usize,
        work: &mut Work,
        (dq, dkv, dtable): (&mut [f32], &mut [f32], &mut [f32]),
    ) {
        let d = self.d;
        let (queries, keys) = (square.queries.len(), square.keys.len() + self.far);
        let Work { q, k, v, y, p, dp, rows } = &mut *work;
        dp.resize(queries * keys, 0.0);
        rows.resize(keys * d, 0.0);
        let dy = Mat::new(y, queries, d);
        gemm(MatMut::new(dp, queries, keys), dy, Mat::new(v, keys, d).t(), 1.0, Threads::One);
        let reached = self.reached(band);
        let first = reached.start * self.grid.cols;
        let (dk, dv) = dkv.split_at_mut((reached.len() * self.grid.cols + self.far) * d);
        let behind = reached.len() * self.grid.cols;
        let scatter = |rows: &[f32], to: &mut [f32]| {
            let places =
                square.keys.iter().map(|(place, _)| place - first).chain((0..self.far).map(|i| behind + i));
            for (place, row) in places.zip(rows.chunks_exact(d)) {
                cpu::rows::add(row, &mut to[place * d..][..d]);
            }
        };
        gemm(MatMut::new(rows, keys, d), Mat::new(p, queries, keys).t(), dy, 1.0, Threads::One);
        scatter(rows, dv);
        softmax_rows_backward(p, dp, keys);
        let dp = Mat::new(dp, queries, keys);
        gemm(MatMut::new(rows, keys, d), dp.t(), Mat::new(q, queries, d), 1.0, Threads::One);
        scatter(rows, dk);
        rows.resize(queries * d, 0.0);
        gemm(MatMut::new(rows, queries, d), dp, Mat::new(k, keys, d), 1.0, Threads::One);
        let start = self.band(band).start * self.grid.cols;
        for ((place, _), row) in square.queries.iter().zip(rows.chunks_exact(d)) {
            dq[(place - start) * d..][..d].copy_from_slice(row);
        }
        if !dtable.is_empty() {
            let taps = key_side(self.w).pow(2);
            for (row, (_, query)) in work.dp.chunks_exact(keys).zip(&square.queries) {
                let entries = &self.rows[query * taps..][..taps];
                for (value, (_, key)) in row.iter().zip(&square.keys) {
                    dtable[entries[*key] as usize] += value;
                }
            }
        }
    }

    /// Adds up what the bands say of their rows of keys, in the order of the bands: [heads, 2, n + far, d].
    fn sum_bands(&self, jobs: &[(usize, usize)], lens: &[usize], parts: &[f32]) -> Vec<f32> {
        let (d, cols, span) = (self.d, self.grid.cols, self.span());
        let starts: Vec<usize> =
            lens.iter().scan(0, |at, len| Some(std::mem::replace(at, *at + len))).collect();
        let (heads, bands) = (self.images * self.heads, self.bands());
        par::build(2 * heads * span, span, |index, sum| {
            let (head, which) = (index / 2, index % 2);
            for job in head * bands..(head + 1) * bands {
                let part = &parts[starts[job] + which * lens[job] / 2..][..lens[job] / 2];
                let reached = self.reached(jobs[job].1);
                let own = reached.len() * cols * d;
                cpu::rows::add(&part[..own], &mut sum[reached.start * cols * d..][..own]);
                cpu::rows::add(&part[own..], &mut sum[self.grid.len() * d..]);
            }
        })
    }

    /// Adds up the tables of all images and bands, head by head: [heads, rows].
    fn sum_tables(&self, rows: usize, parts: &[f32]) -> Vec<f32> {
        let bands = self.bands();
        let mut sum = vec![0.0; self.heads * rows];
        for (job, part) in parts.chunks_exact(rows.max(1)).enumerate() {
            let head = job / bands % self.heads;
            cpu::rows::add(part, &mut sum[head * rows..][..rows]);
        }
        sum
    }
}

/// Working memory of a thread.
#[derive(Default)]
struct Work {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    y: Vec<f32>,
    p: Vec<f32>,
    dp: Vec<f32>,
    rows: Vec<f32>,
}

impl FusedOp for Attend {
    fn name(&self) -> &'static str {
        "window-2d"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [q, pair, table] = cpu::slices(operands)?;
        Ok((self.attend(q, pair, table), operands[0].1.shape().clone()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [q, pair, table] = op::operands(operands)?;
        let [dq, dpair, dtable] = cpu::with_slices([q, pair, table, grad], |[q, pair, table, dy]| {
            Ok(self.gradients(q, pair, table, dy))
        })?;
        Ok(vec![cpu::gradient(q, dq)?, cpu::gradient(pair, dpair)?, cpu::gradient(table, dtable)?])
    }
}
