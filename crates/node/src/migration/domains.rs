//! Processes in Landlock domains, whose restrictions cannot be restored at another node.

use std::sync::OnceLock;

use holdfast_bpf::domains::Domains;

/// Loaded once, because kernel support does not change while the kernel runs.
static DOMAINS: OnceLock<Result<Domains, String>> = OnceLock::new();

/// Returns the first of these processes that is in a domain, with the reason for a refusal. A process that has ended
/// counts as being in none.
pub(super) fn find(pids: &[i32]) -> Option<(i32, String)> {
    let domains = DOMAINS.get_or_init(|| Domains::load().map_err(|error| error.to_string()));
    let unknown =
        |error: &str| format!("whether it is in a Landlock domain cannot be told: {error}");
    pids.iter().find_map(|pid| {
        let why = match domains {
            Err(error) => unknown(error),
            Ok(domains) => match domains.has(*pid) {
                Ok(false) => return None,
                Ok(true) => {
                    "it is in a Landlock domain, which would be lost: run it without".into()
                }
                Err(error) => unknown(&error.to_string()),
            },
        };
        Some((*pid, why))
    })
}
