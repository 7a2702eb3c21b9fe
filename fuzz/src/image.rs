//! Images of processes from a donor: the acceptor decodes them, and checks the rules that the types cannot express.

use holdfast_sys::process::files::Image;
use holdfast_sys::process::image::{
    Checked, Descriptors, Files, Frozen, Missing, PagesIn, Tree, decode, encode,
};

/// Decodes an image of the kind that the first byte gives. An accepted image survives encoding and decoding, and
/// processing it does not panic.
pub fn run(data: &[u8]) -> bool {
    let Some((choice, rest)) = data.split_first() else {
        return false;
    };
    match choice % 5 {
        0 => again::<Tree>(rest).is_some(),
        1 => again::<Frozen>(rest).is_some(),
        2 => again::<Descriptors>(rest).is_some_and(descriptors),
        3 => again::<Missing>(rest).is_some(),
        _ => pages(rest),
    }
}

fn again<T: Checked + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Option<T> {
    let value: T = decode(bytes).ok()?;
    let bytes = encode(&value).expect("it came so");
    let same: T = decode(&bytes).expect("it was encoded");
    assert_eq!(same, value);
    Some(value)
}

/// Changes are checked together with the image that results from them.
fn descriptors(found: Descriptors) -> bool {
    match found.files {
        Files::Image(image) => {
            let nothing = image.changes_since(&image);
            let mut same = image.clone();
            assert!(same.apply(nothing).is_ok() && same == image);
        }
        Files::Changes(changes) => {
            let _ = Image::default().apply(changes);
        }
    }
    true
}

fn pages(bytes: &[u8]) -> bool {
    let Ok(pages) = PagesIn::read(bytes) else {
        return false;
    };
    let alike: Vec<_> = pages.alike().collect();
    let runs: usize = alike.iter().map(|(runs, _)| runs.len()).sum();
    let content: usize = alike.iter().map(|(_, bytes)| bytes.len()).sum();
    assert_eq!((runs, content), (pages.runs.len(), pages.bytes.len()));
    true
}
