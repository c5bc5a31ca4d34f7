//! What launches do, counted by the emulation.

use std::ffi::c_long;

use libloading::Library;

use crate::cuda::Launch;

/// One launch, or several of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Counted {
    /// The kernel.
    pub kernel: String,
    /// How often it was launched.
    pub launches: f64,
    /// Blocks of all launches.
    pub blocks: f64,
    /// Bytes of shared memory of a block.
    pub shared: f64,
    /// Bytes that are read from and written to buffers, each once: what must come from the device's memory, and go there.
    pub memory: [f64; 2],
    /// The same, once per block that has to do with them: what goes between the cache of the device and its multiprocessors.
    pub cache: [f64; 2],
    /// Bytes that threads read from and write to shared memory.
    pub inside: [f64; 2],
    /// Multiply-adds of f32.
    pub products: f64,
    /// Multiply-adds of tensor cores.
    pub fragments: f64,
}

impl Counted {
    /// The last launch of `library`.
    pub fn last_of(library: &Library, launch: &Launch) -> Self {
        let mut counts = [0 as c_long; 9];
        // SAFETY: the symbol has this type, and writes nine numbers.
        unsafe {
            library.get::<unsafe extern "C" fn(*mut c_long)>(b"counts").expect("counts")(counts.as_mut_ptr());
        }
        let [
            read,
            written,
            cache_read,
            cache_written,
            inside_read,
            inside_written,
            fixed,
            products,
            fragments,
        ] = counts.map(|count| count as f64);
        Self {
            kernel: launch.kernel.to_owned(),
            launches: 1.0,
            blocks: launch.grid.iter().product::<usize>() as f64,
            shared: launch.shared as f64 + fixed,
            memory: [read, written],
            cache: [cache_read, cache_written],
            inside: [inside_read, inside_written],
            products,
            fragments,
        }
    }

    /// What grows with the length.
    fn numbers(&self) -> [f64; 9] {
        let Self { blocks, memory: [a, b], cache: [c, d], inside: [e, f], products, fragments, .. } = *self;
        [blocks, a, b, c, d, e, f, products, fragments]
    }

    fn with(&self, [blocks, a, b, c, d, e, f, products, fragments]: [f64; 9]) -> Self {
        Self { blocks, memory: [a, b], cache: [c, d], inside: [e, f], products, fragments, ..self.clone() }
    }

    /// The same in a number of heads that know nothing of each other.
    pub fn times(&self, heads: f64) -> Self {
        self.with(self.numbers().map(|number| heads * number))
    }

    fn add(&mut self, other: &Self) {
        let mut sums = self.numbers();
        sums.iter_mut().zip(other.numbers()).for_each(|(sum, number)| *sum += number);
        *self = Self { launches: self.launches + other.launches, ..self.with(sums) };
    }

    /// What is counted at one, two and three units of length, at `units`: all counts are polynomials of the second degree.
    pub fn at_length(counted: [&Self; 3], units: f64) -> Self {
        let [one, two, three] = counted.map(Self::numbers);
        let mut numbers = [0.0; 9];
        for (number, ((one, two), three)) in numbers.iter_mut().zip(one.iter().zip(two).zip(three)) {
            let (first, second) = (two - one, three - 2.0 * two + one);
            *number = one + (units - 1.0) * first + (units - 1.0) * (units - 2.0) / 2.0 * second;
        }
        counted[0].with(numbers)
    }

    /// The largest share by which a number differs from that of `other`.
    pub fn gap(&self, other: &Self) -> f64 {
        let pairs = self.numbers().into_iter().zip(other.numbers());
        pairs.map(|(a, b)| (a - b).abs() / a.abs().max(b.abs()).max(1.0)).fold(0.0, f64::max)
    }
}

/// Launches of one kernel together, in the order in which kernels are first launched.
pub fn by_kernel(launches: Vec<Counted>) -> Vec<Counted> {
    let mut kernels: Vec<Counted> = Vec::new();
    for launch in launches {
        match kernels.iter_mut().find(|counted| counted.kernel == launch.kernel) {
            Some(counted) => counted.add(&launch),
            None => kernels.push(launch),
        }
    }
    kernels
}

/// A source that counts its products: behind every `sum += a * b` and `sum -= a * b`.
pub fn counting(source: &str) -> String {
    let is_whole = |text: &str| {
        let mut open = 0;
        text.chars().all(|c| {
            open += i32::from(c == '(') - i32::from(c == ')');
            open >= 0 && c != '{'
        })
    };
    let counted = |piece: &str| {
        let statement = piece.strip_suffix(';')?;
        let added = statement.rfind("+= ").max(statement.rfind("-= "))?;
        let sum = &statement[added + 3..];
        (sum.contains(" * ") && is_whole(sum)).then(|| format!("{statement}, count_product();"))
    };
    source.split_inclusive(';').map(|piece| counted(piece).unwrap_or_else(|| piece.to_owned())).collect()
}
