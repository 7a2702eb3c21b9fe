//! Processes with keys in kernel keyrings. Another kernel lacks these keys, and only their owner can read them.

use std::sync::OnceLock;

use holdfast_bpf::keyrings::{KeyDetector, Keyring};
use holdfast_wire::failure::{Context, Failure, ProgramFault};

use crate::failure_conversion::IntoFailure;

static KEYRINGS: OnceLock<Result<KeyDetector, Failure>> = OnceLock::new();

/// Returns the first of these processes that has keys, with the reason for a refusal.
pub(super) fn find_with_keys(pids: &[i32]) -> Option<(i32, Failure)> {
    let keyrings = KEYRINGS.get_or_init(|| KeyDetector::load().map_err(IntoFailure::into_failure));
    let unknown_keys = |failure: Failure| failure.within(Context::KeysUnknown);
    pids.iter().find_map(|pid| {
        let why = match keyrings {
            Err(failure) => unknown_keys(failure.clone()),
            Ok(keyrings) => match keyrings.keyring_with_keys(*pid) {
                Ok(None) => return None,
                Ok(Some(Keyring::ThreadOrProcess)) => ProgramFault::OwnKeys.into(),
                Ok(Some(Keyring::Session)) => ProgramFault::SessionKeys.into(),
                Err(error) => unknown_keys(error.into_failure()),
            },
        };
        Some((*pid, why))
    })
}
