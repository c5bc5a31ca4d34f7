use half::bf16;

use super::*;

/// Numbers between -1 and 1 that no format holds exactly.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(count).collect()
}

fn at(mat: &Mat, i: usize, j: usize, round: bool) -> f64 {
    let x = mat.data[i * mat.row_stride + j * mat.col_stride];
    f64::from(if round { bf16::from_f32(x).to_f32() } else { x })
}

/// Element (i, j) of a b in f64, and what rounding in f32 may change of it.
fn element(a: &Mat, b: &Mat, (i, j): (usize, usize), round: bool) -> (f64, f64) {
    let terms = (0..a.cols).map(|k| at(a, i, k, round) * at(b, k, j, round));
    let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
    (sum, (size + 1.0) * 1e-6)
}

const SHAPES: &[(usize, usize, usize)] = &[
    (1, 1, 1),
    (3, 7, 5),
    (17, 64, 33),
    (65, 3, 130),
    (2, 0, 3),
    (0, 3, 4),
    (50, 101, 1),
    (6, 16, 16),
    (13, 258, 31),
    (12, 513, 32),
    (200, 5, 17),
    (25, 9, 545),
    (11, 300, 70),
    (512, 40, 18),
];

#[test]
fn products_are_those_in_f64_whatever_the_layout() {
    for &(m, k, n) in SHAPES {
        let (a, b) = (numbers(m * (k + 3) + k * m, 1), numbers(k * (n + 2) + n * k, 2));
        let start = numbers((m + 2) * (n + 2), 3);
        for a in [Mat::strided(&a, m, k, k + 3), Mat::new(&a, k, m).t()] {
            for b in [Mat::strided(&b, k, n, n + 2), Mat::new(&b, n, k).t()] {
                for (turned, round) in [(false, false), (true, false), (false, true), (true, true)] {
                    for (alpha, beta) in [(1.0, None), (0.5, None), (-1.5, Some(2.0)), (1.0, Some(1.0))] {
                        let mut c = start.clone();
                        let (to, place) = match turned {
                            false => (MatMut::strided(&mut c, m, n, n + 2), [n + 2, 1]),
                            true => (MatMut::strided(&mut c, n, m, m + 2).t(), [1, m + 2]),
                        };
                        multiply(to, a, b, alpha, beta, round);
                        let mut written = vec![false; c.len()];
                        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                            let index = i * place[0] + j * place[1];
                            written[index] = true;
                            let (sum, gap) = element(&a, &b, (i, j), round);
                            let before = f64::from(beta.unwrap_or(0.0) * start[index]);
                            let want = f64::from(alpha) * sum + before;
                            let got = f64::from(c[index]);
                            assert!((got - want).abs() < 2.0 * gap, "{m} {k} {n} at {i} {j}: {got} {want}");
                        }
                        let gaps = (0..c.len()).filter(|&index| !written[index]);
                        gaps.for_each(|index| assert_eq!(c[index], start[index], "a gap was written"));
                    }
                }
            }
        }
    }
}

#[test]
fn panels_are_the_same_products() {
    for &(m, k, n) in SHAPES {
        let (x, w) = (numbers(m * (k + 1), 1), numbers(k * n, 2));
        let x = Mat::strided(&x, m, k, k + 1);
        for (w, round) in [(Mat::new(&w, k, n), false), (Mat::new(&w, n, k).t(), true)] {
            let start = numbers(m * (n + 3), 3);
            let panels = Panels::new(w, round);
            for add in [false, true] {
                let mut y = start.clone();
                panels.multiply(x, &mut y, n + 3, add);
                for (index, (&y, &before)) in y.iter().zip(&start).enumerate() {
                    let (i, j) = (index / (n + 3), index % (n + 3));
                    if j >= n {
                        assert_eq!(y, before, "a gap was written");
                        continue;
                    }
                    let (sum, gap) = element(&x, &w, (i, j), round);
                    let want = sum + if add { f64::from(before) } else { 0.0 };
                    assert!((f64::from(y) - want).abs() < 2.0 * gap, "{m} {k} {n} at {i} {j}: {y} {want}");
                }
            }
        }
    }
}

#[test]
fn gradients_of_weights_are_those_in_f64_on_any_number_of_threads() {
    let pools = [1, 3].map(|count| rayon::ThreadPoolBuilder::new().num_threads(count).build().unwrap());
    for (rows, out, inp) in [
        (1, 1, 1),
        (0, 3, 4),
        (7, 5, 3),
        (300, 33, 64),
        (513, 70, 65),
        (1500, 130, 100),
        (2100, 20, 40),
        (270, 200, 530),
    ] {
        let (dy, x) = (numbers(rows * (out + 1), 1), numbers(rows * inp, 2));
        let (dy, x) = (Mat::strided(&dy, rows, out, out + 1), Mat::new(&x, rows, inp));
        for round in [false, true] {
            let run = |pool: &rayon::ThreadPool| {
                let mut dw = numbers(out * inp, 3);
                pool.install(|| {
                    add_outer(&mut dw, dy, x, false, round);
                    add_outer(&mut dw, dy, x, true, round);
                });
                dw
            };
            let [dw, again] = pools.each_ref().map(run);
            assert_eq!(dw, again, "threads change the bits of [{rows}, {out}] and [{rows}, {inp}]");
            for (index, &dw) in dw.iter().enumerate() {
                let (sum, gap) = element(&dy.t(), &x, (index / inp, index % inp), round);
                let got = f64::from(dw);
                assert!((got - 2.0 * sum).abs() < 4.0 * gap, "{rows} {out} {inp} at {index}: {got} {sum}");
            }
        }
    }
}

#[test]
fn every_kind_of_number_is_rounded_as_by_half() {
    let ends = [f32::MAX, f32::MIN_POSITIVE, 1e-41, 0.0, f32::INFINITY, f32::NAN, 1.003_906_3, 1.011_718_8];
    let powers = (0..999).map(|i| 1.7f32.powi(i - 500));
    let all: Vec<f32> = ends.iter().flat_map(|&x| [x, -x]).chain(powers).collect();
    let mut got = all.clone();
    pack::round_in_place(&mut got);
    for (x, got) in all.iter().zip(got) {
        assert_eq!(got.to_bits(), bf16::from_f32(*x).to_f32().to_bits(), "{x}");
    }
}

#[test]
#[should_panic(expected = "right factor")]
fn a_short_factor_is_refused() {
    let [_, columns] = shape();
    let c = TileOut { data: &mut [0.0; 64], row: columns, alpha: 1.0, beta: None };
    let b = Right { data: &[0.0; 1], panel: columns * 3, step: columns };
    arch().dispatch(Block {
        c,
        a: Left::Rows { data: &[0.0; 3], stride: 3 },
        b,
        rows: 1,
        depth: 3,
        width: columns,
    });
}
