//! Breaking valid inputs.

use effattn::device::rng::RngStream;

/// Numbers that readers stumble over.
const NUMBERS: &[&str] = &[
    "0",
    "-1",
    "1",
    "255",
    "256",
    "65536",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "1e309",
    "-0.0",
    "NaN",
    "inf",
    "1e-320",
    "0x10",
    "٣",
];

/// Text that is not what it seems.
const ODD: &[&str] = &[
    "", " ", "\n", "\r\n", "\t", "\0", "\u{feff}", "é", "𝄞", "\"", "'", ",", ":", "..", "[", "]", "{", "}",
    "=", "#", "*",
];

/// One of `seeds`, broken in one to six places.
pub fn mutated(seeds: &[Vec<u8>], words: &[&str], random: &mut RngStream) -> Vec<u8> {
    let mut bytes = seeds[random.below(seeds.len())].clone();
    for _ in 0..=random.below(6) {
        change(&mut bytes, seeds, words, random);
    }
    bytes.truncate(1 << 16);
    bytes
}

fn change(bytes: &mut Vec<u8>, seeds: &[Vec<u8>], words: &[&str], random: &mut RngStream) {
    let at = random.below(bytes.len() + 1);
    let span = |random: &mut RngStream, bytes: &[u8]| {
        let from = random.below(bytes.len() + 1);
        let most = if random.below(4) == 0 { bytes.len() - from } else { (bytes.len() - from).min(16) };
        from..from + random.below(most + 1)
    };
    match random.below(10) {
        0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        1 if at < bytes.len() => bytes[at] = random.below(256) as u8,
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(span(random, bytes))),
        4 => {
            let copy = bytes[span(random, bytes)].to_vec();
            bytes.splice(at..at, copy);
        }
        5 => {
            let other = &seeds[random.below(seeds.len())];
            let piece = other[span(random, other)].to_vec();
            bytes.splice(at..at, piece);
        }
        6 => insert(bytes, at, NUMBERS, random),
        7 => insert(bytes, at, ODD, random),
        8 if !words.is_empty() => insert(bytes, at, words, random),
        _ => number(bytes, at, random),
    }
}

fn insert(bytes: &mut Vec<u8>, at: usize, texts: &[&str], random: &mut RngStream) {
    bytes.splice(at..at, texts[random.below(texts.len())].bytes());
}

/// Puts another number in the place of the next one behind `at`; eight bytes of an extreme one where there is none.
fn number(bytes: &mut Vec<u8>, at: usize, random: &mut RngStream) {
    let digit = |byte: &u8| byte.is_ascii_digit();
    match bytes[at..].iter().position(digit) {
        Some(start) => {
            let start = at + start;
            let end = start + bytes[start..].iter().take_while(|byte| digit(byte)).count();
            bytes.splice(start..end, NUMBERS[random.below(NUMBERS.len())].bytes());
        }
        None => {
            let extreme = [u64::MAX, i64::MAX as u64, 1 << 32, 1 << 16, 0][random.below(5)].to_le_bytes();
            let end = (at + 8).min(bytes.len());
            bytes.splice(at..end, extreme);
        }
    }
}
