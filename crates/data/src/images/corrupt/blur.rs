//! Blurs: out of focus, through frosted glass, in motion, towards the viewer.

use super::planes::{Border, Planes, bell};
use effattn_kernel::device::rng::RngStream;

/// A disk of `radius` pixels with edges softened by `alias`.
pub fn defocus(image: &Planes, (radius, alias): (f64, f64)) -> Planes {
    let kernel = disk(radius, alias);
    let reach = kernel.len() as i64 / 2;
    let taps = kernel.iter().enumerate().flat_map(|(y, row)| {
        let place = move |x: usize| (x as i64 - reach, y as i64 - reach);
        row.iter()
            .enumerate()
            .filter(|(_, weight)| **weight != 0.0)
            .map(move |(x, weight)| (place(x), *weight))
    });
    spread(image, &taps.collect::<Vec<_>>(), Border::Reflect101)
}

/// Rows of the kernel of [`defocus`].
fn disk(radius: f64, alias: f64) -> Vec<Vec<f32>> {
    let (reach, soft) = if radius <= 8.0 { (8, 1) } else { (radius as i64, 2) };
    let side = (2 * reach + 1) as usize;
    let inside = |x: usize, y: usize| {
        let far = (x as i64 - reach).pow(2) + (y as i64 - reach).pow(2);
        f32::from(u8::from(far as f64 <= radius * radius))
    };
    let hard = Planes::layer((side, side), inside);
    let area: f32 = hard.planes[0].iter().sum();
    let soft = super::planes::symmetric(&bell(alias, soft), side, Border::Reflect101);
    let smooth = hard.map(|x| x / area).mixed(&soft, &soft, |value| value);
    smooth.planes[0].chunks(side).map(<[f32]>::to_vec).collect()
}

/// Sums of neighbours: places relative to a pixel, and their weights.
fn spread(image: &Planes, taps: &[((i64, i64), f32)], border: Border) -> Planes {
    let (width, height) = image.size();
    let mut planes = vec![vec![0.0f32; width * height]; image.planes.len()];
    for ((dx, dy), weight) in taps {
        let columns: Vec<usize> = (0..width).map(|x| border.place(x as i64 + dx, width)).collect();
        for y in 0..height {
            let from = border.place(y as i64 + dy, height) * width;
            for (out, plane) in planes.iter_mut().zip(&image.planes) {
                let line = &plane[from..from + width];
                let out = &mut out[y * width..][..width];
                out.iter_mut().zip(&columns).for_each(|(sum, column)| *sum += weight * line[*column]);
            }
        }
    }
    Planes { planes, width, height }
}

/// Blurred, every pixel replaced by one at most `far` away, `times` over, and blurred again. The released code means to
/// exchange the two pixels, but its arrays share their memory, so that one of them is lost: the published files are so.
pub fn glass(image: &Planes, (sigma, far, times): (f64, usize, usize), stream: &mut RngStream) -> Planes {
    let mut image = image.blurred(sigma, 4.0, Border::Nearest).steps();
    let (width, height) = image.size();
    let places = |len: usize| (far + 1..=len.saturating_sub(far).min(len - 1)).rev();
    for _ in 0..times {
        for y in places(height) {
            for x in places(width) {
                let mut near = |at: usize| at + stream.below(2 * far) - far;
                let (column, row) = (near(x), near(y));
                image.planes.iter_mut().for_each(|plane| plane[y * width + x] = plane[row * width + column]);
            }
        }
    }
    image.blurred(sigma, 4.0, Border::Nearest)
}

/// Drawn out along a line at `angle` degrees (from the columns to the rows), to one side: `sigma` pixels, cut off at twice
/// `radius`.
pub fn motion(image: &Planes, (radius, sigma): (f64, f64), angle: f64) -> Planes {
    let count = 2 * radius.ceil() as usize + 1;
    let weights: Vec<f64> = (0..count).map(|i| (-0.5 * (i as f64 / sigma).powi(2)).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let (sin, cos) = angle.to_radians().sin_cos();
    let tap = |(i, weight): (usize, &f64)| {
        let place = |along: f64| (i as f64 * along - 0.5).ceil() as i64;
        ((place(cos), place(sin)), (weight / sum) as f32)
    };
    spread(image, &weights.iter().enumerate().map(tap).collect::<Vec<_>>(), Border::Nearest)
}

/// The mean of the image and of `count` zooms of it, `step` apart, the first of them 1.
pub fn zoom(image: Planes, (count, step): (usize, f64)) -> Planes {
    let step = (1.0 + step) - 1.0; // as NumPy's arange rounds it: sizes of zooms are rounded in turn
    let all = (0..count)
        .fold(image.clone(), |sum, number| sum.with(&image.zoomed(1.0 + number as f64 * step), |a, b| a + b));
    all.map(|x| x / (count + 1) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(side: usize) -> Planes {
        let middle = side / 2;
        Planes::layer((side, side), |x, y| f32::from(u8::from((x, y) == (middle, middle))))
    }

    fn near(a: f32, b: f64) -> bool {
        (f64::from(a) - b).abs() < 1e-5
    }

    #[test]
    fn a_point_out_of_focus_is_the_disk() {
        // 29 places lie within 3 of the middle; alias 0.1 leaves them as they are
        let out = defocus(&point(25), (3.0, 0.1));
        let at = |x: usize, y: usize| out.planes[0][25 * y + x];
        assert!(near(at(12, 12), 1.0 / 29.0) && near(at(15, 12), 1.0 / 29.0) && near(at(14, 14), 1.0 / 29.0));
        assert!(near(at(16, 12), 0.0) && near(at(15, 13), 0.0));
        // alias 0.5: neighbours weigh exp(-2)
        let soft = defocus(&point(25), (4.0, 0.5));
        let (edge, inside) = ((-2.0f64).exp(), 1.0 / 49.0);
        let share = edge / (1.0 + 2.0 * edge);
        assert!(near(soft.planes[0][25 * 12 + 12], inside));
        assert!(near(soft.planes[0][25 * 12 + 17], share * (1.0 - 2.0 * share) * inside));
        // a disk that touches the edge of its kernel gains there, as OpenCV 5.0 says
        for (radius, alias, side, sum) in
            [(6.0, 0.5, 17, 1.0), (8.0, 0.5, 17, 1.0129755), (10.0, 0.5, 21, 1.0107858), (0.3, 0.4, 17, 1.0)]
        {
            let kernel = disk(radius, alias);
            assert_eq!(kernel.len(), side);
            assert!(near(kernel.concat().iter().sum(), sum), "{radius}");
        }
    }

    #[test]
    fn motion_goes_to_one_side() {
        let out = motion(&point(21), (2.0, 1.0), 0.0);
        let weights: Vec<f64> = (0..5).map(|i| (-0.5 * f64::from(i * i)).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for (i, weight) in weights.iter().enumerate() {
            assert!(near(out.planes[0][21 * 10 + 10 - i], weight / sum), "{i}");
        }
        assert!(out.planes[0][21 * 10 + 11..].iter().all(|x| *x == 0.0));
        // at 45 degrees 2 places along the line are 1 column and 1 row, 4 are 3 and 3
        let slanted = motion(&point(21), (2.0, 1.0), 45.0);
        let at = |step: usize| slanted.planes[0][21 * (10 - step) + 10 - step];
        assert!(near(at(1), (weights[1] + weights[2]) / sum) && near(at(3), weights[4] / sum));
        assert!(near(at(2), weights[3] / sum) && near(at(0), weights[0] / sum));
    }

    #[test]
    fn a_zoom_is_a_mean_of_zooms() {
        let picture = Planes::layer((16, 16), |x, y| (x * y) as f32 / 225.0);
        let out = zoom(picture.clone(), (2, 0.5));
        let by_hand = picture.clone().with(&picture, |a, b| a + b).with(&picture.zoomed(1.5), |a, b| a + b);
        assert_eq!(out, by_hand.map(|x| x / 3.0));
    }

    #[test]
    fn glass_takes_pixels_from_nearby() {
        // two planes say where a pixel was; sigma 0.05 blurs nothing
        let place = |x: usize| x as f32 / 255.0;
        let mut picture = Planes::layer((32, 32), |x, _| place(x));
        picture.planes.push(Planes::layer((32, 32), |_, y| place(y)).planes.remove(0));
        let out = glass(&picture, (0.05, 1, 1), &mut RngStream::new(3, "glass"));
        let mut counts = [0; 2];
        for (at, (a, b)) in out.planes[0].iter().zip(&out.planes[1]).enumerate() {
            for (from, here) in [(a, at % 32), (b, at / 32)] {
                let back = here as i64 - (from * 255.0).round() as i64;
                // places from 31 down to 2 are moved, in whole numbers from -1 to below 1
                assert!(back == 0 || back == 1 && here >= 2, "{here} {back}");
                counts[back as usize] += 1;
            }
        }
        assert!(counts[1] > 700 && counts[1] < 1100, "half of 2 x 30 x 30 moves: {counts:?}");
        let flat = Planes::layer((20, 20), |_, _| 0.4).steps();
        let glassy = glass(&flat, (1.5, 4, 2), &mut RngStream::new(3, "glass"));
        assert!(glassy.planes[0].iter().all(|x| (x - 0.4).abs() < 1e-5));
        let tiny = Planes::layer((1, 1), |_, _| 0.4);
        assert_eq!(glass(&tiny, (0.7, 1, 2), &mut RngStream::new(3, "glass")).size(), (1, 1));
    }
}
