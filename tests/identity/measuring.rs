//! Rows of measurements: everything but the times and bytes.

use super::kept::{DIGITS, same};
use super::{data, latest, processor, said, told};

const ONCE: &str = "--no-plot --threads 1 --data-dir . --quiet";

/// The rows of a run of `line`.
fn hold(name: &str, line: &str) {
    let folder = data();
    said(folder.path(), &format!("{line} {ONCE}"));
    let run = latest(folder.path(), line.split(' ').next().unwrap());
    let (text, digits) = told(&run);
    let digits = if digits.is_empty() { digits } else { format!("{DIGITS}{}\n{digits}", processor(&run)) };
    same(&format!("runs/{name}.txt"), &format!("# effattn {line}\n{text}{digits}"));
}

const BRIEF: &str = "--warmup 0 --runs 2 --min-runs 1 --max-time 1ms";

#[test]
fn rows_of_speed_are_the_same() {
    hold("speed", &format!("speed --preset ls-lra --model full,ls:w=4,r=2 --len 32 --batch 1,2 {BRIEF}"));
    hold(
        "speed-decode",
        &format!("speed --mode decode --model full,cosformer --len 32 --set layers=1 --set width=64 {BRIEF}"),
    );
    hold(
        "speed-kernel-only",
        &format!("speed --kernel-only --model full,linear --len 32 --dtype bf16 {BRIEF}"),
    );
}

#[test]
fn rows_of_a_profile_are_the_same() {
    hold(
        "speed-profile",
        &format!("speed --preset ls-lra --model ls --len 32 --seed 3 --set layers=1 --profile {BRIEF}"),
    );
}

#[test]
fn rows_of_memory_are_the_same() {
    hold(
        "memory",
        "memory --preset ls-lra --model full,transformer-xl --len 32 --batch 1,2 --kernel composed",
    );
    hold("memory-fit", "memory --preset ls-lra --model linear --fit 8MiB --mode train");
}

#[test]
fn rows_of_simple_rules_are_the_same() {
    hold("lra-floor", "lra --floor --task listops,text --allow-partial --limit 40");
}
