//! Processes with keys in kernel keyrings. Another kernel lacks these keys, and only their owner can read them.

use std::sync::OnceLock;

use holdfast_bpf::keyrings::{KeyDetector, Keyring};

static KEYRINGS: OnceLock<Result<KeyDetector, String>> = OnceLock::new();

/// Returns the first of these processes that has keys, with the reason for a refusal.
pub(super) fn find_with_keys(pids: &[i32]) -> Option<(i32, String)> {
    let keyrings = KEYRINGS.get_or_init(|| KeyDetector::load().map_err(|error| error.to_string()));
    let unknown_keys =
        |error: &str| format!("cannot check whether the process has keys (keyctl): {error}");
    pids.iter().find_map(|pid| {
        let why = match keyrings {
            Err(error) => unknown_keys(error),
            Ok(keyrings) => match keyrings.keyring_with_keys(*pid) {
                Ok(None) => return None,
                Ok(Some(Keyring::ThreadOrProcess)) => {
                    "the process has keys in its own keyring (keyctl), which would be lost: let it remove them"
                        .into()
                }
                Ok(Some(Keyring::Session)) => {
                    "the session keyring has keys (keyctl), which would be lost: start the process \
                     in a session without (`keyctl session - COMMAND`), or remove them"
                        .into()
                }
                Err(error) => unknown_keys(&error.to_string()),
            },
        };
        Some((*pid, why))
    })
}
