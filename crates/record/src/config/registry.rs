//! Tables that a user of the library adds to at run time.

use std::sync::{PoisonError, RwLock};

/// The entries of a table, then those that were added.
pub struct Registry<T: ?Sized + 'static> {
    table: &'static [&'static T],
    added: RwLock<Vec<&'static T>>,
}

impl<T: ?Sized> Registry<T> {
    /// The entries of `table`.
    pub const fn new(table: &'static [&'static T]) -> Self {
        Self { table, added: RwLock::new(Vec::new()) }
    }

    /// Adds an entry; one that is there already stays as it is.
    pub fn add(&self, entry: &'static T) {
        let mut added = self.added.write().unwrap_or_else(PoisonError::into_inner);
        if !self.table.iter().chain(added.iter()).any(|known| std::ptr::eq(*known, entry)) {
            added.push(entry);
        }
    }

    /// Every entry.
    pub fn all(&self) -> Vec<&'static T> {
        let added = self.added.read().unwrap_or_else(PoisonError::into_inner);
        self.table.iter().chain(added.iter()).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_in_order_and_once() {
        static ALL: Registry<u8> = Registry::new(&[&7]);
        static MORE: [u8; 2] = [9, 8];
        for entry in [&MORE[0], &MORE[1], &MORE[0]] {
            ALL.add(entry);
        }
        assert_eq!(ALL.all(), [&7, &9, &8]);
    }
}
