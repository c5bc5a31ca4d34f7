//! Which of ImageNet's 1000 classes (in the order of their sorted names) take part where, and how answers are judged
//! (`SPEC-vision.md` section 11).

/// Classes of ImageNet.
pub const IMAGENET: usize = 1000;

/// The 200 classes of ImageNet-A: numbers, and ranges with both ends.
const A: &str = "\
    6 11 13 15 17 22-23 27 30 37 39 42 47 50 57 70-71 76 79 89-90 94 96-97 99 105 107-108 110 113 124-125 130 \
    132 143-144 150-151 207 234-235 254 277 283 287 291 295 298 301 306-311 313-315 317 319 323-324 326-327 330 \
    334-336 347 361 363 372 378 386 397 400-402 404 407 411 416-417 420 425 428 430 437-438 445 456-457 461-462 \
    470 472 483 486 488 492 496 514 516 528 530 539 542-543 549 552 557 561-562 569 572-573 575 579 589 606-607 \
    609 614 626-627 640-643 658 668 677 682 684 687 701 704 719 736 746 749 752 758 763 765 768 773-774 776 \
    779-780 786 792 797 802-804 813 815 820 823 831 833 835 839 845 847 850 859 862 870 879-880 888 890 897 900 \
    907 913 924 932-934 937 943 945 947 951 954 956-957 959 971-972 980-981 984 986-988";

/// The 200 classes of ImageNet-R.
const R: &str = "\
    1-2 4 6 8-9 11 13 22-23 26 29 31 39 47 63 71 76 79 84 90 94 96-97 99-100 105 107 113 122 125 130 132 144-145 \
    147-148 150-151 155 160-163 171-172 178 187 195 199 203 207-208 219 231-232 234-235 242 245 247 250-251 254 \
    259-260 263 265 267 269 276-277 281 288-289 291-293 296 299 301 308-311 314-315 319 323 327 330 334-335 \
    337-338 340-341 344 347 353 355 361-362 365-368 372 388 390 393 397 401 407 413-414 425 428 430 435 437 441 \
    447-448 457 462-463 469-472 476 483 487 515 546 555 558 570 579 583 587 593-594 596 609 613 617 621 629 637 \
    657-658 701 717 724 763 768 774 776 779-780 787 805 812 815 820 824 833 847 852 866 875 883 889 895 907 928 \
    931-934 936-937 943 945 947-949 951 953-954 957 963 965 967 980-981 983 988";

/// The nine groups of ImageNet-9, in the order of their folders: a word of the folder's name, and the classes.
pub const NINE: [(&str, &str); 9] = [
    ("dog", "151-170 173-268"),
    ("bird", "7-24 87-100 127-146"),
    (
        "vehicle",
        "407-408 428 436 444 468 511 547 555 561 565 569 573 586 603 609 612 627 656 661 665 670-671 675 690 705 717 734 751 757 791 802-803 817 820 829 847 864 866-867 870 880",
    ),
    ("reptile", "33-68"),
    ("carnivore", "269-280 286-299 356-362 387-388"),
    ("insect", "300-326"),
    (
        "instrument",
        "401-402 420 432 486 494 513 541 546 558 566 577 579 593-594 641-642 683-684 687 699 776 822 875 881 889",
    ),
    ("primate", "365-384"),
    ("fish", "0-6 389-397"),
];

/// What a model with as many logits as classes says, and whether it is right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The class with the largest logit.
    All,
    /// That among these classes only; labels count them.
    Among(Vec<usize>),
    /// The group of the class with the largest logit; a class without a group is wrong.
    Groups(Vec<Option<u32>>),
    /// The class with the largest logit, of which several are right; labels count their lists.
    OneOf(Vec<Vec<u32>>),
}

/// The numbers in `text`: `6 11 22-23`.
fn numbers(text: &str) -> Vec<usize> {
    let range = |word: &str| {
        let (first, last) = word.split_once('-').unwrap_or((word, word));
        first.parse().unwrap_or(0)..=last.parse().unwrap_or(0)
    };
    text.split_whitespace().flat_map(range).collect()
}

/// The largest of `logits`, the first among equals.
fn largest(logits: impl Iterator<Item = f32>) -> Option<usize> {
    let best = logits.enumerate().fold(None, |best: Option<(usize, f32)>, (at, logit)| match best {
        _ if logit.is_nan() => best,
        Some((_, most)) if most >= logit => best,
        _ => Some((at, logit)),
    });
    best.map(|(at, _)| at)
}

impl Answer {
    /// ImageNet-A's.
    pub fn imagenet_a() -> Self {
        Self::Among(numbers(A))
    }

    /// ImageNet-R's.
    pub fn imagenet_r() -> Self {
        Self::Among(numbers(R))
    }

    /// ImageNet-9's.
    pub fn imagenet_9() -> Self {
        let mut groups = vec![None; IMAGENET];
        for (group, (_, classes)) in NINE.iter().enumerate() {
            numbers(classes).into_iter().for_each(|class| groups[class] = Some(group as u32));
        }
        Self::Groups(groups)
    }

    /// Whether `logits` answer `label`.
    pub fn right(&self, logits: &[f32], label: u32) -> bool {
        let first = || largest(logits.iter().copied()).map(|class| class as u32);
        let found = match self {
            Self::All => first(),
            Self::OneOf(lists) => {
                let list = lists.get(label as usize);
                return first().zip(list).is_some_and(|(class, list)| list.contains(&class));
            }
            Self::Among(classes) => {
                let logit = |class: &usize| logits.get(*class).copied().unwrap_or(f32::NEG_INFINITY);
                largest(classes.iter().map(logit)).map(|class| class as u32)
            }
            Self::Groups(groups) => {
                largest(logits.iter().copied()).and_then(|class| groups.get(class).copied().flatten())
            }
        };
        found == Some(label)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_maps_are_the_published_ones() {
        let (a, r): (BTreeSet<usize>, BTreeSet<usize>) =
            (numbers(A).into_iter().collect(), numbers(R).into_iter().collect());
        assert_eq!((a.len(), r.len(), a.intersection(&r).count()), (200, 200, 86));
        assert!(numbers(A).is_sorted() && numbers(R).is_sorted());
        assert_eq!((numbers(A)[4], numbers(A)[199], numbers(R)[0], numbers(R)[199]), (17, 988, 1, 988));
        let Answer::Groups(groups) = Answer::imagenet_9() else { panic!() };
        assert_eq!(groups.iter().filter(|group| group.is_none()).count(), 630);
        let of = |class: usize| groups[class].map(|group| NINE[group as usize].0);
        assert_eq!(
            [of(151), of(172), of(33), of(889), of(397), of(398)],
            [Some("dog"), None, Some("reptile"), Some("instrument"), Some("fish"), None]
        );
        let all: usize = NINE.iter().map(|(_, classes)| numbers(classes).len()).sum();
        assert_eq!(all, 370, "no class is in two groups");
    }

    #[test]
    fn answers_are_judged() {
        let mut logits = vec![0.0; IMAGENET];
        (logits[7], logits[13], logits[11]) = (9.0, 5.0, 4.0);
        assert!(Answer::All.right(&logits, 7) && !Answer::All.right(&logits, 13));
        // 7 is not among ImageNet-A's 6, 11, 13: the third wins
        let among = Answer::imagenet_a();
        assert!(among.right(&logits, 2) && !among.right(&logits, 1));
        let nine = Answer::imagenet_9();
        assert!(nine.right(&logits, 1), "7 is a bird");
        logits[398] = 10.0;
        assert!((0..9).all(|label| !nine.right(&logits, label)), "398 has no group");
        let several = Answer::OneOf(vec![vec![398, 7], vec![]]);
        assert!(several.right(&logits, 0) && !several.right(&logits, 1) && !several.right(&logits, 2));
        assert!(Answer::All.right(&[1.0, 1.0], 0), "the first among equals");
        assert!(!Answer::All.right(&[f32::NAN, 1.0], 0));
    }
}
