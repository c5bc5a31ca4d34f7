//! Noise: drawn for every pixel and channel.

use rand_distr::{Distribution, Poisson};

use super::planes::Planes;
use effattn_kernel::device::rng::RngStream;

/// x + N(0, `std`).
pub fn gaussian(image: Planes, std: f64, stream: &mut RngStream) -> Planes {
    image.map(|x| x + (std * stream.normal()) as f32)
}

/// Poisson(x `photons`) / `photons`.
pub fn shot(image: Planes, photons: f64, stream: &mut RngStream) -> Planes {
    image.map(|x| {
        let drawn = Poisson::new(f64::from(x) * photons).map_or(0.0, |counts| counts.sample(stream.rng()));
        (drawn / photons) as f32
    })
}

/// A number is replaced with chance `share`, by 0 or 1.
pub fn impulse(image: Planes, share: f64, stream: &mut RngStream) -> Planes {
    image.map(|x| match stream.uniform(0.0, 1.0) {
        drawn if drawn < share / 2.0 => 0.0,
        drawn if drawn < share => 1.0,
        _ => x,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statistics(of: impl FnOnce(Planes, &mut RngStream) -> Planes, shade: f32) -> (f64, f64) {
        let flat = Planes { planes: vec![vec![shade; 40_000]; 3], width: 200, height: 200 };
        let out = of(flat, &mut RngStream::new(1, "noise"));
        assert_ne!(out.planes[0], out.planes[1], "channels have noise of their own");
        let all: Vec<f64> = out.planes.concat().into_iter().map(f64::from).collect();
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        (mean, all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / all.len() as f64)
    }

    #[test]
    fn moments_are_those_of_the_distributions() {
        let (mean, variance) = statistics(|x, stream| gaussian(x, 0.08, stream), 0.5);
        assert!((mean - 0.5).abs() < 1e-3 && (variance.sqrt() - 0.08).abs() < 5e-4, "{mean} {variance}");
        // Poisson's variance is its mean: x / photons
        let (mean, variance) = statistics(|x, stream| shot(x, 60.0, stream), 0.3);
        assert!((mean - 0.3).abs() < 1e-3 && (variance - 0.3 / 60.0).abs() < 1e-4, "{mean} {variance}");
        // half of the replaced are 1: mean x (1 - c) + c / 2
        let (mean, variance) = statistics(|x, stream| impulse(x, 0.27, stream), 0.25);
        assert!((mean - (0.25 * 0.73 + 0.135)).abs() < 3e-3, "{mean}");
        let second = 0.25f64.powi(2) * 0.73 + 0.135;
        assert!((variance - (second - mean * mean)).abs() < 3e-3, "{variance}");
    }

    #[test]
    fn shots_come_in_whole_photons_and_black_stays_black() {
        let black = Planes { planes: vec![vec![0.0; 50]; 3], width: 50, height: 1 };
        assert_eq!(shot(black.clone(), 3.0, &mut RngStream::new(1, "x")), black);
        let gray = black.map(|_| 0.7);
        let out = shot(gray, 3.0, &mut RngStream::new(1, "x"));
        assert!(out.planes.concat().iter().all(|x| (3.0 * x - (3.0 * x).round()).abs() < 1e-5));
    }

    #[test]
    fn impulses_are_black_or_white_and_the_rest_stays() {
        let gray = Planes { planes: vec![vec![0.4; 10_000]; 3], width: 100, height: 100 };
        let out = impulse(gray, 0.1, &mut RngStream::new(2, "x")).planes.concat();
        let count = |value: f32| out.iter().filter(|x| **x == value).count() as f64 / out.len() as f64;
        assert!((count(0.0) - 0.05).abs() < 5e-3 && (count(1.0) - 0.05).abs() < 5e-3);
        assert!((count(0.0) + count(1.0) + count(0.4) - 1.0).abs() < 1e-9);
    }
}
