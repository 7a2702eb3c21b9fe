//! Images of processes from a donor: the acceptor decodes them, and checks the rules that the types cannot express.

use holdfast_checkpoint::files::FilesImage;
use holdfast_checkpoint::image::{
    BorrowedPages, DescriptorUpdate, MissingPages, OpenFilesUpdate, ProcessTreeState, TreeLayout,
    Validate, decode, encode,
};

/// Decodes an image of the kind that the first byte gives. An accepted image survives encoding and decoding, and
/// processing it does not panic.
pub fn run(data: &[u8]) -> bool {
    let Some((choice, rest)) = data.split_first() else {
        return false;
    };
    match choice % 5 {
        0 => assert_round_trip::<TreeLayout>(rest).is_some(),
        1 => assert_round_trip::<ProcessTreeState>(rest).is_some(),
        2 => assert_round_trip::<DescriptorUpdate>(rest).is_some_and(check_descriptors),
        3 => assert_round_trip::<MissingPages>(rest).is_some(),
        _ => check_pages(rest),
    }
}

fn assert_round_trip<T: Validate + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Option<T> {
    let value: T = decode(bytes).ok()?;
    let bytes = encode(&value).expect("it came so");
    let redecoded: T = decode(&bytes).expect("it was encoded");
    assert_eq!(redecoded, value);
    Some(value)
}

/// Changes are checked together with the image that results from them.
fn check_descriptors(found: DescriptorUpdate) -> bool {
    match found.files {
        OpenFilesUpdate::Image(image) => {
            let empty_changes = image.changes_since(&image);
            let mut same = image.clone();
            assert!(same.apply(empty_changes).is_ok() && same == image);
        }
        OpenFilesUpdate::Changes(changes) => {
            let _ = FilesImage::default().apply(changes);
        }
    }
    true
}

fn check_pages(bytes: &[u8]) -> bool {
    let Ok(pages) = BorrowedPages::decode(bytes) else {
        return false;
    };
    let alike: Vec<_> = pages.groups().collect();
    let runs: usize = alike.iter().map(|(runs, _)| runs.len()).sum();
    let content: usize = alike.iter().map(|(_, bytes)| bytes.len()).sum();
    assert_eq!((runs, content), (pages.runs.len(), pages.bytes.len()));
    true
}
