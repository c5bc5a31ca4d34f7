//! Snow, frost and fog.

use super::blur::motion;
use super::planes::Planes;
use effattn_kernel::device::rng::RngStream;

/// Numbers of [`snow`]: mean, deviation, zoom and threshold of the flakes, radius and sigma of their motion, share of the
/// image.
pub type Flakes = (f64, f64, f64, f32, f64, f64, f32);

/// Flakes that fall over a whitened image.
pub fn snow(
    image: Planes,
    (mean, std, zoom, least, radius, sigma, own): Flakes,
    stream: &mut RngStream,
) -> Planes {
    let drawn = Planes::layer(image.size(), |_, _| (mean + std * stream.normal()) as f32);
    let flakes = drawn.zoomed(zoom).map(|x| if x < least { 0.0 } else { x }).steps();
    let moved = motion(&flakes, (radius, sigma), stream.uniform(-135.0, -45.0));
    let flakes = moved.map(|x| (x.clamp(0.0, 1.0) * 255.0).round() / 255.0);
    let mut turned = flakes.clone();
    turned.planes[0].reverse(); // by 180 degrees
    let gray = gray(&image);
    let white = image.with(&gray, |x, gray| own * x + (1.0 - own) * x.max(1.5 * gray + 0.5));
    white.with(&flakes, |x, flake| x + flake).with(&turned, |x, flake| x + flake)
}

/// 0.299 R + 0.587 G + 0.114 B.
fn gray(image: &Planes) -> Planes {
    let (width, height) = image.size();
    let [red, green, blue] = [0, 1, 2].map(|channel: usize| &image.planes[channel]);
    Planes::layer((width, height), |x, y| {
        let at = y * width + x;
        0.299 * red[at] + 0.587 * green[at] + 0.114 * blue[at]
    })
}

/// `own` of the image and `ice` of a layer of ice crystals.
///
/// The published files blend in photographs, which are not ours to give away. This layer is drawn instead: bluish white
/// ridges of a rough [`plasma`], dark between them.
pub fn frost(image: Planes, (own, ice): (f32, f32), stream: &mut RngStream) -> Planes {
    let heights = plasma(image.size(), 1.5, stream);
    let crystals = heights.map(|x| (1.0 - (2.0 * x - 1.0).abs()).powi(3));
    let mut layer = Planes { planes: vec![crystals.planes[0].clone(); 3], ..crystals };
    for (plane, (dark, light)) in layer.planes.iter_mut().zip([(0.15, 0.75), (0.2, 0.78), (0.3, 0.7)]) {
        plane.iter_mut().for_each(|x| *x = dark + light * *x);
    }
    image.with(&layer, |x, layer| own * x + ice * layer)
}

/// A cloud of density `dense`, the brightest number of the image kept.
pub fn fog(image: Planes, (dense, decay): (f32, f64), stream: &mut RngStream) -> Planes {
    let brightest = image.planes.iter().flatten().copied().fold(0.0f32, f32::max);
    let cloud = plasma(image.size(), decay, stream);
    image.with(&cloud, |x, cloud| (x + dense * cloud) * brightest / (brightest + dense))
}

/// Heights on 0 to 1 by diamonds and squares: a new point is the mean of its four neighbours and a draw that gets smaller
/// by `decay` from level to level; a square map whose edges meet, of which the first rows and columns are taken.
pub fn plasma((width, height): (usize, usize), decay: f64, stream: &mut RngStream) -> Planes {
    let side = width.max(height).next_power_of_two();
    let mut map = vec![0.0f64; side * side];
    let (mut step, mut rough) = (side, 100.0);
    while step >= 2 {
        let half = step / 2;
        let mut fill = |map: &mut Vec<f64>, (top, left): (usize, usize), around: [(usize, usize); 4]| {
            for y in (top..side).step_by(step) {
                for x in (left..side).step_by(step) {
                    let near = |(dy, dx): (usize, usize)| map[(y + dy) % side * side + (x + dx) % side];
                    let mean = around.map(near).iter().sum::<f64>() / 4.0;
                    map[y * side + x] = mean + rough * stream.uniform(-rough, rough);
                }
            }
        };
        let back = side - half;
        fill(&mut map, (half, half), [(back, back), (back, half), (half, back), (half, half)]);
        let sides = [(0, back), (0, half), (back, 0), (half, 0)];
        fill(&mut map, (0, half), sides);
        fill(&mut map, (half, 0), sides);
        (step, rough) = (half, rough / decay);
    }
    let low = map.iter().copied().fold(f64::INFINITY, f64::min);
    let high = map.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let range = if high > low { high - low } else { 1.0 };
    Planes::layer((width, height), |x, y| ((map[y * side + x] - low) / range) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flat(shades: [f32; 3]) -> Planes {
        Planes { planes: shades.map(|shade| vec![shade; 32 * 32]).to_vec(), width: 32, height: 32 }
    }

    #[test]
    fn fog_follows_its_formula() {
        let stream = || RngStream::new(5, "fog");
        let cloud = plasma((32, 32), 2.0, &mut stream());
        let values = &cloud.planes[0];
        assert!(values.iter().all(|x| (0.0..=1.0).contains(x)));
        let mut sorted = values.clone();
        sorted.sort_by(f32::total_cmp);
        assert_eq!((sorted[0], sorted[1023]), (0.0, 1.0), "the whole map was taken");
        let out = fog(flat([0.2, 0.5, 0.8]), (1.5, 2.0), &mut stream());
        for (at, cloud) in values.iter().enumerate() {
            assert!((out.planes[0][at] - (0.2 + 1.5 * cloud) * 0.8 / 2.3).abs() < 1e-6);
        }
        // the brightest pixel stays below what it was
        assert!(out.planes.iter().flatten().all(|x| *x <= 0.8 + 1e-6));
    }

    #[test]
    fn a_plasma_is_smooth_and_joins_at_its_edges() {
        let map = plasma((64, 64), 3.0, &mut RngStream::new(1, "plasma")).planes.remove(0);
        let step = |a: usize, b: usize| (map[a] - map[b]).abs();
        let inside: f32 = (0..64).map(|y| step(64 * y + 30, 64 * y + 31)).sum();
        let joint: f32 = (0..64).map(|y| step(64 * y + 63, 64 * y)).sum();
        let far: f32 = (0..64).map(|y| step(64 * y, 64 * y + 32)).sum();
        assert!(joint < 3.0 * inside && far > 2.0 * inside, "{inside} {joint} {far}");
    }

    #[test]
    fn snow_whitens_and_falls_symmetrically() {
        // a threshold above every flake leaves the whitened image
        let none = (0.1, 0.2, 1.0, 9.0, 8.0, 3.0, 0.7);
        let out = snow(flat([0.2, 0.4, 0.6]), none, &mut RngStream::new(1, "snow"));
        let gray = 0.299 * 0.2 + 0.587 * 0.4 + 0.114 * 0.6;
        for (plane, shade) in out.planes.iter().zip([0.2f32, 0.4, 0.6]) {
            let expected = 0.7 * shade + 0.3 * shade.max(1.5 * gray + 0.5);
            assert!(plane.iter().all(|x| (x - expected).abs() < 1e-6));
        }
        let some =
            snow(flat([0.0; 3]), (0.55, 0.3, 2.5, 0.85, 12.0, 12.0, 1.0), &mut RngStream::new(1, "snow"));
        let layer = &some.planes[0];
        assert!(layer.iter().any(|x| *x > 0.1));
        assert!(layer.iter().zip(layer.iter().rev()).all(|(a, b)| (a - b).abs() < 1e-6), "turned by 180");
        assert_eq!(some.planes[0], some.planes[2], "flakes are gray");
    }

    #[test]
    fn frost_blends() {
        let (a, b) = (flat([0.0; 3]), flat([0.5; 3]));
        let stream = || RngStream::new(1, "frost");
        let (ice, both) = (frost(a, (0.7, 0.7), &mut stream()), frost(b, (0.7, 0.7), &mut stream()));
        let same = both.planes.iter().flatten().zip(ice.planes.iter().flatten());
        assert!(same.clone().all(|(both, ice)| (both - ice - 0.35).abs() < 1e-6));
        assert!(same.clone().all(|(_, ice)| (0.0..=0.7).contains(ice)));
        assert!(same.map(|(_, ice)| *ice).fold(0.0, f32::max) > 0.3, "there are crystals");
    }
}
