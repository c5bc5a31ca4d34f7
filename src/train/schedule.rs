//! Learning rate and momentum of every step (`docs/spec/SPEC-models.md` section 4).

use serde::{Deserialize, Serialize};

/// How the learning rate and beta1 change over the steps s = 0, 1, ...
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "schedule", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Schedule {
    /// One cycle, linear, with the momentum cycling that PyTorch switches on by default (Transformer-LS).
    /// With lo = peak/25, end = lo/1e4, e = warmup - 1: lo to peak at s = e, then to end at s = steps - 1;
    /// beta1 0.95 to 0.85 and back.
    Onecycle {
        /// Highest rate.
        peak_lr: f64,
        /// Steps up to the highest rate.
        warmup: u64,
        /// All steps.
        steps: u64,
        /// Whether beta1 cycles; otherwise it is 0.9.
        #[serde(default = "yes")]
        cycle_momentum: bool,
    },
    /// base min(1, s/W) / sqrt(max(s, W)) (Long Range Arena). The rate of step 0 is 0.
    Rsqrt {
        /// Factor.
        base_lr: f64,
        /// W.
        warmup: u64,
    },
    /// peak min(1, (s + 1)/W): linear warm-up, then constant (language models of Transformer-LS).
    WarmupConstant {
        /// Highest rate.
        peak_lr: f64,
        /// W.
        warmup: u64,
    },
    /// base min(1, s/W) max(0, (1 + cos(pi frac(max(0, s - W)/C)))/2) (image tasks of the Long Range Arena).
    Cosine {
        /// Highest rate.
        base_lr: f64,
        /// W.
        warmup: u64,
        /// C, steps per cycle.
        cycle: u64,
    },
    /// `start_lr` + (peak - `start_lr`) s/W for s < W, then `min_lr` + (peak - `min_lr`) (1 + cos(pi s/`steps`))/2, whose
    /// phase counts from the first step (image models of Transformer-LS).
    WarmupCosine {
        /// Highest rate.
        peak_lr: f64,
        /// Rate of step 0.
        start_lr: f64,
        /// Rate at the end.
        min_lr: f64,
        /// W.
        warmup: u64,
        /// All steps.
        steps: u64,
    },
    /// peak s/W, then from peak down to `end_lr` at s = `total` by (1 - (s - W)/(total - W))^`power` (fairseq). The rate
    /// of step 0 is 0.
    Polynomial {
        /// Highest rate.
        peak_lr: f64,
        /// W.
        warmup: u64,
        /// Steps until the last rate is reached.
        total: u64,
        /// Power of what is left.
        power: f64,
        /// Last rate.
        end_lr: f64,
    },
    /// base (1 + cos(pi e/`epochs`))/2 in epoch e = floor(s/`epoch`), from 0: set once per epoch (Zoology).
    EpochCosine {
        /// Highest rate.
        base_lr: f64,
        /// Steps per epoch.
        epoch: u64,
        /// Epochs until the rate is 0.
        epochs: u64,
    },
    /// `start_lr` + s (peak - start_lr)/W, then cosines from peak to `min_lr` over cycles of length `cycle` times
    /// `growth`^i, cycle i scaled by `shrink`^i (fairseq; language models of Baevski & Auli).
    CosineRestarts {
        /// Highest rate.
        peak_lr: f64,
        /// Rate of step 0.
        start_lr: f64,
        /// Rate at the end of a cycle.
        min_lr: f64,
        /// W.
        warmup: u64,
        /// Steps of the first cycle.
        cycle: u64,
        /// What a cycle is longer than the one before.
        growth: f64,
        /// What a cycle's rates are multiplied by, against the one before.
        shrink: f64,
    },
}

fn yes() -> bool {
    true
}

/// What one step uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepRates {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
}

impl Schedule {
    /// The rates of step `s`, counted from 0. Behind the last step of one cycle its last values stay.
    pub fn at(&self, s: u64) -> StepRates {
        let ramp = |done: u64, warmup: u64| (done as f64 / warmup.max(1) as f64).min(1.0);
        let plain = |lr: f64| StepRates { lr, beta1: 0.9 };
        match *self {
            Self::Onecycle { peak_lr, warmup, steps, cycle_momentum } => {
                let rates = one_cycle(s, peak_lr, warmup, steps);
                if cycle_momentum { rates } else { plain(rates.lr) }
            }
            Self::Rsqrt { base_lr, warmup } => {
                plain(base_lr * ramp(s, warmup) / (s.max(warmup).max(1) as f64).sqrt())
            }
            Self::WarmupConstant { peak_lr, warmup } => plain(peak_lr * ramp(s + 1, warmup)),
            Self::Cosine { base_lr, warmup, cycle } => {
                let turns = s.saturating_sub(warmup) as f64 / cycle.max(1) as f64;
                let wave = 0.5 * (1.0 + (std::f64::consts::PI * turns.fract()).cos());
                plain(base_lr * ramp(s, warmup) * wave.max(0.0))
            }
            Self::EpochCosine { base_lr, epoch, epochs } => {
                let done = (s / epoch.max(1)) as f64 / epochs.max(1) as f64;
                plain(base_lr * 0.5 * (1.0 + (std::f64::consts::PI * done.min(1.0)).cos()))
            }
            Self::WarmupCosine { peak_lr, start_lr, warmup, .. } if s < warmup => {
                plain(start_lr + (peak_lr - start_lr) * s as f64 / warmup as f64)
            }
            Self::WarmupCosine { peak_lr, min_lr, steps, .. } => {
                let wave = 0.5 * (1.0 + (std::f64::consts::PI * ramp(s, steps)).cos());
                plain(min_lr + (peak_lr - min_lr) * wave)
            }
            Self::Polynomial { peak_lr, warmup, .. } if s <= warmup => plain(peak_lr * ramp(s, warmup)),
            Self::Polynomial { peak_lr, warmup, total, power, end_lr } => {
                let left = 1.0 - (s - warmup) as f64 / total.saturating_sub(warmup).max(1) as f64;
                plain(end_lr + (peak_lr - end_lr) * left.max(0.0).powf(power))
            }
            Self::CosineRestarts { peak_lr, start_lr, warmup, .. } if s < warmup => {
                plain(start_lr + s as f64 * (peak_lr - start_lr) / warmup as f64)
            }
            Self::CosineRestarts { peak_lr, min_lr, warmup, cycle, growth, shrink, .. } => {
                let (mut at, mut length, mut scale) = ((s - warmup) as f64, cycle.max(1) as f64, 1.0);
                while at >= length {
                    at -= length;
                    length *= growth.max(1.0);
                    scale *= shrink;
                }
                let wave = 0.5 * (1.0 + (std::f64::consts::PI * at / length).cos());
                plain(scale * (min_lr + (peak_lr - min_lr) * wave))
            }
        }
    }
}

fn one_cycle(s: u64, peak: f64, warmup: u64, steps: u64) -> StepRates {
    let lo = peak / 25.0;
    let end = lo / 1e4;
    let turn = warmup.saturating_sub(1);
    if s <= turn && turn > 0 {
        let f = s as f64 / turn as f64;
        return StepRates { lr: lo + (peak - lo) * f, beta1: 0.95 - 0.10 * f };
    }
    let left = steps.saturating_sub(1).saturating_sub(turn).max(1);
    let f = ((s - turn.min(s)) as f64 / left as f64).min(1.0);
    StepRates { lr: peak + (end - peak) * f, beta1: 0.85 + 0.10 * f }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(got: f64, want: f64) {
        assert!((got - want).abs() <= 2e-6 * want.abs(), "{got} instead of {want}");
    }

    #[test]
    fn fairseqs_schedules_have_the_specified_values() {
        let (peak_lr, start_lr, min_lr, growth, shrink) = (1.0, 1e-7, 1e-4, 2.0, 0.75);
        let wiki = |warmup, cycle| Schedule::CosineRestarts {
            peak_lr,
            start_lr,
            min_lr,
            warmup,
            cycle,
            growth,
            shrink,
        };
        for (s, lr) in [(100, 0.0062501), (8000, 0.5), (16_000, 1.0), (60_500, 0.934466), (149_999, 0.505873)]
        {
            assert!((wiki(16_000, 270_000).at(s).lr - lr).abs() < 5e-7, "{s}");
        }
        for (s, lr) in [(8000, 0.961944), (60_500, 0.75), (100_000, 0.566753), (149_999, 0.113399)] {
            assert!((wiki(500, 60_000).at(s).lr - lr).abs() < 5e-7, "{s}");
        }
        let linear =
            Schedule::Polynomial { peak_lr: 3e-4, warmup: 3000, total: 50_000, power: 1.0, end_lr: 0.0 };
        assert_eq!((linear.at(0).lr, linear.at(50_000).lr), (0.0, 0.0));
        near(linear.at(3000).lr, 3e-4);
        near(linear.at(26_500).lr, 1.5e-4);
    }

    #[test]
    fn one_cycle_has_the_specified_values() {
        type Case<'a> = (u64, u64, &'a [(u64, f64, f64)]); // steps, warm-up, (s, lr, beta1)
        let cases: &[Case] = &[
            (
                5000,
                1000,
                &[
                    (0, 4e-6, 0.95),
                    (500, 5.2048e-5, 0.89995),
                    (999, 1e-4, 0.85),
                    (1000, 9.9975e-5, 0.850025),
                    (3000, 4.99752e-5, 0.900025),
                    (4999, 4e-10, 0.95),
                ],
            ),
            (
                20000,
                8000,
                &[
                    (4000, 5.2006e-5, 0.899994),
                    (7999, 1e-4, 0.85),
                    (14000, 4.99919e-5, 0.900008),
                    (19998, 8.7333e-9, 0.949992),
                ],
            ),
            (30000, 8000, &[(8000, 9.99955e-5, 0.850005), (29998, 4.94544e-9, 0.949995)]),
        ];
        for (steps, warmup, values) in cases {
            let schedule =
                Schedule::Onecycle { peak_lr: 1e-4, warmup: *warmup, steps: *steps, cycle_momentum: true };
            for (s, lr, beta1) in *values {
                let rates = schedule.at(*s);
                near(rates.lr, *lr);
                near(rates.beta1, *beta1);
            }
        }
    }

    #[test]
    fn reciprocal_square_root_has_the_specified_values() {
        let cases: &[(u64, &[(u64, f64)])] = &[
            (1000, &[(0, 0.0), (1, 1.58114e-6), (500, 7.90569e-4), (1000, 1.58114e-3), (4999, 7.07178e-4)]),
            (8000, &[(4000, 2.79508e-4), (8000, 5.59017e-4), (19999, 3.53562e-4)]),
        ];
        for (warmup, values) in cases {
            for (s, lr) in *values {
                let rates = Schedule::Rsqrt { base_lr: 0.05, warmup: *warmup }.at(*s);
                near(rates.lr, *lr);
                assert_eq!(rates.beta1, 0.9);
            }
        }
    }

    #[test]
    fn warm_up_then_constant_and_cosine() {
        let constant = Schedule::WarmupConstant { peak_lr: 2e-3, warmup: 4 };
        let lrs: Vec<f64> = (0..6).map(|s| constant.at(s).lr).collect();
        assert_eq!(lrs, [5e-4, 1e-3, 1.5e-3, 2e-3, 2e-3, 2e-3]);
        let cosine = Schedule::Cosine { base_lr: 5e-4, warmup: 175, cycle: 35_000 };
        near(cosine.at(0).lr, 0.0);
        near(cosine.at(175).lr, 5e-4);
        near(cosine.at(175 + 17_500).lr, 2.5e-4);
        assert!(cosine.at(175 + 34_999).lr < 1e-11);
    }

    #[test]
    fn schedules_without_warm_up_or_beyond_their_end_are_finite() {
        for steps in [0, 1, 2] {
            for warmup in [0, 1, 2, 5] {
                let all = [
                    Schedule::Onecycle { peak_lr: 1.0, warmup, steps, cycle_momentum: false },
                    Schedule::Rsqrt { base_lr: 1.0, warmup },
                    Schedule::WarmupConstant { peak_lr: 1.0, warmup },
                    Schedule::Cosine { base_lr: 1.0, warmup, cycle: steps },
                ];
                for schedule in all {
                    for s in 0..8 {
                        let rates = schedule.at(s);
                        assert!((0.0..=1.0).contains(&rates.lr), "{schedule:?} {s}: {rates:?}");
                    }
                }
            }
        }
    }
}
