//! Processes with keys in kernel keyrings. Another kernel lacks these keys, and only their owner can read them.

use std::sync::OnceLock;

use holdfast_bpf::keyrings::{Keyring, Keyrings};

static KEYRINGS: OnceLock<Result<Keyrings, String>> = OnceLock::new();

/// Returns the first of these processes that has keys, with the reason for a refusal.
pub(super) fn find(pids: &[i32]) -> Option<(i32, String)> {
    let keyrings = KEYRINGS.get_or_init(|| Keyrings::load().map_err(|error| error.to_string()));
    let unknown = |error: &str| format!("whether it has keys (keyctl) cannot be told: {error}");
    pids.iter().find_map(|pid| {
        let why = match keyrings {
            Err(error) => unknown(error),
            Ok(keyrings) => match keyrings.with_keys(*pid) {
                Ok(None) => return None,
                Ok(Some(Keyring::Own)) => {
                    "it has keys in a keyring of its own (keyctl), which would be lost: let it remove them"
                        .into()
                }
                Ok(Some(Keyring::Session)) => {
                    "its session keyring has keys (keyctl), which would be lost: start it in a session without \
                     (`keyctl session - COMMAND`), or remove them"
                        .into()
                }
                Err(error) => unknown(&error.to_string()),
            },
        };
        Some((*pid, why))
    })
}
