//! The file with a node's saved membership.

use holdfast_wire::saved_membership::SavedMembership;

/// Reads any bytes as a saved membership. What is read must survive writing and reading again.
pub fn run(data: &[u8]) -> bool {
    let Ok(saved) = SavedMembership::decode(data) else {
        return false;
    };
    let bytes = saved.encode().expect("a saved membership can be written");
    assert_eq!(SavedMembership::decode(&bytes), Ok(saved));
    true
}
