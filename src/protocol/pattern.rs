//! Who sees whom: the pattern of each mechanism as a matrix of zeros and ones (Transformer-LS Figure 1, left).
//!
//! Mechanisms that are a pattern give the very value they compute with. Those whose pairs depend on the data
//! are asked with one random input, and of those that weigh every pair without a softmax the weights of one are drawn: their
//! pattern would be a solid square.

use anyhow::Result;

use super::attention_matrix::{ProbeConfig, implied};
use effattn_model::attention::Growth;
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::attention::knobs::{Kind, Knobs, Value};
use effattn_record::matrix::Matrix;
use effattn_record::pattern::{Grid2d, Pattern};

/// Implied weights below this share of the largest are rounding, not visibility.
const ROUNDING: f32 = 1e-6;

/// The pattern of `choice` in the situation of `probe`.
pub fn matrix(choice: &MechanismChoice, probe: &ProbeConfig) -> Result<Matrix> {
    let shape = probe.shape();
    probe.admits(choice)?;
    match (choice.entry.pattern)(&choice.knobs, &shape) {
        Some(pattern) => match implied(choice, probe) {
            Ok(weights) if is_dense(&pattern, probe) && choice.entry.time == Growth::Linear => {
                Ok(Matrix { note: noted("every pair, through kernel features", &weights), ..weights })
            }
            _ => Ok(drawn(choice, &pattern, probe)),
        },
        None => {
            let mut matrix = implied(choice, probe)?;
            let largest = matrix.values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
            let is_seen = |value: f32| value.abs() > ROUNDING * largest;
            let (keys, causal) = (matrix.keys, probe.causal);
            let mut pairs = matrix.values.iter().enumerate();
            if pairs.all(|(pair, value)| is_seen(*value) || causal && pair % keys > pair / keys) {
                matrix.note = noted("every pair", &matrix);
            } else {
                matrix.values.iter_mut().for_each(|value| *value = f32::from(is_seen(*value)));
                matrix.note = "depends on the input: one random input".to_owned();
            }
            Ok(matrix)
        }
    }
}

/// What a panel of weights says: that every pair has one, and of what these are.
fn noted(what: &str, weights: &Matrix) -> String {
    let own = if weights.note.is_empty() { String::new() } else { format!("; {}", weights.note) };
    format!("{what}: its weights for one random input{own}")
}

/// Whether every query sees every key that it may, without slots.
fn is_dense(pattern: &Pattern, probe: &ProbeConfig) -> bool {
    let all = |query: usize| pattern.visible(probe.head, query).len() == pattern.keys;
    pattern.slots == 0
        && (*pattern == Pattern::full(pattern.queries, pattern.keys, probe.causal)
            || !probe.causal && (0..pattern.queries).all(all))
}

/// What the position in the middle of an image sees, as an image.
fn drawn_image(
    choice: &MechanismChoice,
    pattern: &Pattern,
    (grid, order): (Grid2d, &[usize]),
    head: usize,
) -> Matrix {
    let middle = grid.rows / 2 * grid.cols + grid.cols / 2;
    let mut values = vec![0.0; grid.len()];
    let query = order.iter().position(|position| *position == middle).unwrap_or(0);
    for key in pattern.visible(head, query).into_iter().filter(|key| *key < grid.len()) {
        values[key] = 1.0;
    }
    let (y, x) = grid.place(middle);
    let slots =
        if pattern.slots > 0 { format!("; and {} slots of all", pattern.slots) } else { String::new() };
    Matrix {
        label: choice.label(),
        note: format!("an image: what row {y}, column {x} sees{slots}"),
        queries: grid.rows,
        keys: grid.cols,
        values,
        ..Matrix::default()
    }
}

fn drawn(choice: &MechanismChoice, pattern: &Pattern, probe: &ProbeConfig) -> Matrix {
    if let Some((grid, order)) = &pattern.plane {
        return drawn_image(choice, pattern, (*grid, order), probe.head);
    }
    let columns = pattern.keys + pattern.slots;
    let mut values = vec![0.0; pattern.queries * columns];
    for query in 0..pattern.queries {
        for key in pattern.visible(probe.head, query) {
            values[query * columns + key] = 1.0;
        }
    }
    let mut notes = Vec::new();
    if pattern.slots > 0 {
        notes.push(format!("{} slots", pattern.slots));
    } else if is_dense(pattern, probe) && choice.entry.time == Growth::Linear {
        notes.push("every pair, through kernel features".to_owned());
    } else if is_dense(pattern, probe) {
        notes.push("every pair".to_owned());
    }
    if pattern.heads.windows(2).any(|pair| pair[0] != pair[1]) {
        notes.push(format!("head {} of {}", probe.head, pattern.heads.len()));
    }
    Matrix {
        label: choice.label(),
        note: notes.join("; "),
        queries: pattern.queries,
        keys: pattern.keys,
        slots: pattern.slots,
        values,
        ..Matrix::default()
    }
}

/// A mechanism that was named without settings, with its defaults scaled down so that a picture of few
/// positions shows its structure: sizes above 8 are divided by the power of two that brings the largest below
/// an eighth of the length, but not below 2. Sizes that do not change the picture keep their default.
pub fn at_scale(choice: &MechanismChoice, probe: &ProbeConfig) -> MechanismChoice {
    let sizes: Vec<(&'static str, usize, usize)> = choice
        .entry
        .knobs
        .iter()
        .filter_map(|knob| match knob.kind {
            Kind::Int { min, default, .. } if default > 8 => Some((knob.name, default, min)),
            _ => None,
        })
        .collect();
    let largest = sizes.iter().map(|(_, size, _)| *size).max().unwrap_or(0);
    let mut divisor = 1;
    while largest / divisor >= (probe.len / 8).max(2) {
        divisor *= 2;
    }
    if choice.variant.is_some() || !choice.named.is_empty() || divisor == 1 {
        return choice.clone();
    }
    let pattern = |knobs: &Knobs| (choice.entry.pattern)(knobs, &probe.shape());
    let mut scaled = choice.knobs.clone();
    for (name, size, min) in &sizes {
        scaled = scaled.with(name, Value::Int((size / divisor).max(2).max(*min)));
    }
    for (name, size, _) in &sizes {
        let kept = scaled.clone().with(name, Value::Int(*size));
        if pattern(&kept).is_some() && pattern(&kept) == pattern(&scaled) {
            scaled = kept;
        }
    }
    let variant = Some(scaled.changes(choice.entry.knobs)).filter(|changes| !changes.is_empty());
    let scaled = MechanismChoice { knobs: scaled, variant, ..choice.clone() };
    if probe.admits(&scaled).is_ok() { scaled } else { choice.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_model::attention::choose::choose;

    fn of(model: &str, probe: &ProbeConfig) -> Result<Matrix> {
        matrix(&at_scale(&choose(&model.parse().unwrap())?[0], probe), probe)
    }

    #[test]
    fn a_drawn_pattern_is_what_the_mechanism_computes() {
        // Where the implied weights vanish nobody looks; values must enter linearly, so no DualLN.
        let models = [
            "full",
            "window:w=4",
            "dp:r=3",
            "ls:w=4,r=3,dual_ln=false",
            "linformer:k=5",
            "local:block=4",
            "linear",
            "longformer:left=2,right=1,global=0+7",
            "bigbird:block=4,num_rand=1",
            "sparse:block=4,c=1",
            "sparse:pattern=strided,stride=5,local=3",
        ];
        for model in models {
            for causal in [false, true] {
                let probe = ProbeConfig { len: 22, causal, ..ProbeConfig::default() };
                let choice = &choose(&model.parse().unwrap()).unwrap()[0];
                if probe.admits(choice).is_err() {
                    continue;
                }
                let drawn = matrix(choice, &probe).unwrap();
                let computed = implied(choice, &probe).unwrap();
                for query in 0..22 {
                    let through_slots = drawn.row(query)[drawn.keys..].contains(&1.0);
                    for key in 0..22 {
                        let seen = computed.row(query)[key] != 0.0;
                        let expected = drawn.row(query)[key] != 0.0 || through_slots && !causal;
                        let open = causal && through_slots && key <= query;
                        assert!(
                            seen == expected || open,
                            "{model} causal {causal}: {query} sees {key}: {seen} {}",
                            computed.row(query)[key]
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn an_image_is_drawn_around_one_position() {
        let probe = ProbeConfig { len: 64, ..ProbeConfig::default() };
        let image = of("ls2d:w=2,r=3", &probe).unwrap();
        assert_eq!((image.queries, image.keys, image.slots), (8, 8, 0));
        assert_eq!(image.note, "an image: what row 4, column 4 sees; and 3 slots of all");
        for (at, value) in image.values.iter().enumerate() {
            let near = |place: usize| (3..7).contains(&place);
            assert_eq!(*value == 1.0, near(at / 8) && near(at % 8), "{at}");
        }
        let line = ProbeConfig { len: 63, ..ProbeConfig::default() };
        assert!(of("ls2d", &line).unwrap_err().to_string().contains("a square number of positions"));
    }

    #[test]
    fn what_depends_on_the_input_is_drawn_from_one() {
        let probe = ProbeConfig { len: 32, ..ProbeConfig::default() };
        let reformer = of("reformer:chunk=4", &probe).unwrap();
        assert_eq!(reformer.note, "depends on the input: one random input");
        let seen = reformer.values.iter().filter(|value| **value == 1.0).count();
        assert!((32..32 * 24).contains(&seen), "{seen}");
        let is_square = |matrix: &Matrix| matrix.values.iter().all(|value| [0.0, 1.0].contains(value));
        for model in ["nystrom", "linear", "cosformer"] {
            let weights = of(model, &probe).unwrap();
            assert!(
                weights.note.starts_with("every pair") && !is_square(&weights),
                "{model}: {}",
                weights.note
            );
        }
        let causal = ProbeConfig { causal: true, ..probe };
        for model in ["retention", "gla", "deltanet", "linear"] {
            let weights = of(model, &causal).unwrap();
            assert!(
                weights.note.starts_with("every pair") && !is_square(&weights),
                "{model}: {}",
                weights.note
            );
            let future = (0..32 * 32).filter(|pair| pair % 32 > pair / 32);
            assert!(future.into_iter().all(|pair| weights.values[pair].abs() < 1e-6), "{model}");
        }
    }

    #[test]
    fn defaults_are_scaled_and_settings_are_not() {
        let probe = ProbeConfig { len: 64, ..ProbeConfig::default() };
        assert_eq!(of("longformer", &probe).unwrap().label, "longformer:left=3,right=4");
        assert_eq!(of("longformer:left=6", &probe).unwrap().label, "longformer:left=6");
        assert_eq!(of("full", &probe).unwrap().label, "full");
        let causal = ProbeConfig { causal: true, ..probe };
        assert!(of("nystrom", &causal).unwrap_err().to_string().contains("nystrom has no causal form"));
    }
}
