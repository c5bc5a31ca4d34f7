//! Several outputs built together by jobs of unequal size.

use std::mem::MaybeUninit;

use bytemuck::Zeroable;

use super::pieces::each_piece_with;

/// `K` vectors, each cut into consecutive pieces of the given lengths: `f(scratch, job, pieces)` fills piece number
/// `job` of every vector and finds zeros there. Jobs run in parallel; what they are depends on `lens`
/// only. Panics if the lists of lengths differ in length.
pub fn build_jobs<const K: usize, T>(
    lens: [&[usize]; K],
    init: impl Fn() -> T + Sync + Send,
    f: impl Fn(&mut T, usize, [&mut [f32]; K]) + Sync + Send,
) -> [Vec<f32>; K] {
    jobs_onto([(); K].map(|()| Vec::new()), lens, init, f)
}

/// [`build_jobs`] where a vector of `before` that is not empty is not made anew: jobs find there what it holds. Panics if
/// its length is not the sum of the lengths.
pub fn jobs_onto<const K: usize, T>(
    before: [Vec<f32>; K],
    lens: [&[usize]; K],
    init: impl Fn() -> T + Sync + Send,
    f: impl Fn(&mut T, usize, [&mut [f32]; K]) + Sync + Send,
) -> [Vec<f32>; K] {
    let jobs = lens.first().map_or(0, |lens| lens.len());
    assert!(lens.iter().all(|lens| lens.len() == jobs), "outputs have as many pieces each");
    let totals = lens.map(|lens| lens.iter().sum::<usize>());
    let fresh = before.each_ref().map(Vec::is_empty);
    let mut data = before;
    for ((data, fresh), total) in data.iter_mut().zip(fresh).zip(totals) {
        if fresh {
            data.reserve_exact(total);
        }
        assert!(fresh || data.len() == total, "the pieces are the whole");
    }
    let mut rests =
        data.each_mut().map(|data| if data.is_empty() { data.spare_capacity_mut() } else { held(data) });
    let mut pieces = Vec::with_capacity(jobs);
    for job in 0..jobs {
        let mut lens = lens.iter().map(|lens| lens[job]);
        pieces.push(rests.each_mut().map(|rest| {
            let (piece, tail) = std::mem::take(rest).split_at_mut(lens.next().unwrap_or(0));
            *rest = tail;
            piece
        }));
    }
    each_piece_with(pieces.into_iter(), init, |scratch, job, pieces| {
        let mut fresh = fresh.iter();
        f(
            scratch,
            job,
            pieces.map(|piece| if *fresh.next().unwrap_or(&true) { zeroed(piece) } else { kept(piece) }),
        );
    });
    for (data, total) in data.iter_mut().zip(totals) {
        // SAFETY: the pieces are consecutive and their lengths add up to `total`; every one of a new vector was zeroed,
        // those of the others were there.
        unsafe { data.set_len(total) };
    }
    data
}

/// Elements that are there as a place for jobs: only [`kept`] reads them.
fn held(data: &mut [f32]) -> &mut [MaybeUninit<f32>] {
    // SAFETY: MaybeUninit<f32> has the layout of f32; nothing that is not initialised is written to a piece of it.
    unsafe { &mut *(std::ptr::from_mut(data) as *mut [MaybeUninit<f32>]) }
}

/// A piece of what was [`held`].
fn kept(piece: &mut [MaybeUninit<f32>]) -> &mut [f32] {
    // SAFETY: it comes from initialised elements.
    unsafe { &mut *(std::ptr::from_mut(piece) as *mut [f32]) }
}

/// Zeros in place of whatever a chunk holds.
#[inline]
pub(super) fn zeroed<E: Zeroable + Copy>(chunk: &mut [MaybeUninit<E>]) -> &mut [E] {
    chunk.fill(MaybeUninit::new(E::zeroed()));
    // SAFETY: every element was just written, and MaybeUninit<E> has the layout of E.
    unsafe { &mut *(std::ptr::from_mut(chunk) as *mut [E]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_is_filled_by_its_job() {
        let [a, b] = build_jobs(
            [&[2, 0, 1], &[1, 1, 3]],
            || (),
            |(), job, [a, b]| {
                assert!(a.iter().chain(&*b).all(|&x| x == 0.0));
                a.fill(job as f32 + 1.0);
                b.fill(-(job as f32) - 1.0);
            },
        );
        assert_eq!(a, [1.0, 1.0, 3.0]);
        assert_eq!(b, [-1.0, -2.0, -3.0, -3.0, -3.0]);
        let [empty] = build_jobs([&[]], || (), |(), _, _| ());
        assert!(empty.is_empty());
    }

    #[test]
    fn what_is_there_is_added_to() {
        let [a, b] = jobs_onto(
            [vec![1.0, 2.0, 3.0], Vec::new()],
            [&[2, 1], &[1, 1]],
            || (),
            |(), job, [a, b]| {
                a.iter_mut().for_each(|x| *x += 10.0 * (job as f32 + 1.0));
                b.iter_mut().for_each(|x| *x += 1.0);
            },
        );
        assert_eq!((a, b), (vec![11.0, 12.0, 23.0], vec![1.0; 2]));
    }

    #[test]
    #[should_panic(expected = "as many pieces")]
    fn unequal_lists_are_refused() {
        build_jobs([&[1], &[]], || (), |(), _, _| ());
    }
}
