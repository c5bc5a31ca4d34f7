//! Dropout of attention weights: what it does where a mechanism has it, and that it does nothing elsewhere.

use effattn::kernel::KernelMode;
use effattn::kernel::dropout::AttentionDropout;

use super::run::{Findings, Inputs, MODES, Results, Run, differs, masks, row_counts};
use super::zoo::cases;

fn dropout(rate: f64, seed: u64) -> Option<AttentionDropout> {
    AttentionDropout::new(rate, seed).expect("a rate below 1")
}

#[test]
fn mechanisms_that_say_so_drop_weights_alike_in_both_forms_and_others_none() {
    let mut findings = Findings::default();
    for case in cases(29) {
        let (params, inputs) = (case.params().unwrap(), Inputs::random(&case, 1));
        for mask in masks(&case).into_iter().take(3) {
            let weigh = |sample: usize, _: usize, query: usize| {
                f32::from(u8::from(row_counts(&case, mask.as_deref(), sample, query)))
            };
            let run = |mode, dropout| {
                let run = Run::new(&case, &params, &inputs, mode);
                Run { mask: mask.as_deref(), weigh: &weigh, dropout, ..run }.results()
            };
            let whole = run(KernelMode::Fused, None);
            let [fused, composed] = MODES.map(|mode| run(mode, dropout(0.4, 9)));
            if case.entry.support.dropout == (fused.out == whole.out) {
                findings.add(format!("{case}: support.dropout is {}", case.entry.support.dropout));
            }
            let counts =
                |sample: usize, _: usize, query: usize| row_counts(&case, mask.as_deref(), sample, query);
            if let Some(row) = differs(&case, (&fused.out, &composed.out), 1e-4, counts) {
                findings.add(format!("{case}: fused and composed differ at {row:?}"));
            }
            for (name, fused) in &fused.grads {
                let composed = &composed.grads[name];
                let largest = composed.iter().fold(1f32, |most, x| most.max(x.abs()));
                if fused.iter().zip(composed).any(|(a, b)| (a - b).abs() > 1e-3 * largest) {
                    findings.add(format!("{case}: gradients of {name} differ"));
                }
            }
        }
    }
    findings.finish();
}

#[test]
fn the_mean_over_many_draws_is_the_output_without_dropout() {
    const DRAWS: u64 = 150;
    let mut findings = Findings::default();
    for case in cases(13).iter().filter(|case| case.entry.support.dropout) {
        let (params, inputs) = (case.params().unwrap(), Inputs::random(case, 2));
        let out = |dropout| {
            let Results { out, .. } =
                Run { dropout, ..Run::new(case, &params, &inputs, KernelMode::Fused) }.results();
            out
        };
        let whole = out(None);
        let (mut sum, mut squares) = (vec![0f64; whole.len()], vec![0f64; whole.len()]);
        for seed in 0..DRAWS {
            for (at, x) in out(dropout(0.3, seed)).into_iter().enumerate() {
                sum[at] += f64::from(x);
                squares[at] += f64::from(x) * f64::from(x);
            }
        }
        let wrong = (0..whole.len()).find(|&at| {
            let mean = sum[at] / DRAWS as f64;
            let variance = (squares[at] / DRAWS as f64 - mean * mean).max(0.0);
            // six standard errors of the mean
            (mean - f64::from(whole[at])).abs() > 6.0 * (variance / DRAWS as f64).sqrt() + 1e-5
        });
        if let Some(at) = wrong {
            findings.add(format!(
                "{case}: element {at}: {} instead of {}",
                sum[at] / DRAWS as f64,
                whole[at]
            ));
        }
    }
    findings.finish();
}
