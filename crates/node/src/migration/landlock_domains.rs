//! Processes in Landlock domains, whose restrictions cannot be restored at another node.

use std::sync::OnceLock;

use holdfast_bpf::landlock::LandlockDomains;

/// Loaded once, because kernel support does not change while the kernel runs.
static DOMAINS: OnceLock<Result<LandlockDomains, String>> = OnceLock::new();

/// Returns the first of these processes that is in a domain, with the reason for a refusal. A process that has ended
/// counts as being in none.
pub(super) fn find_in_domain(pids: &[i32]) -> Option<(i32, String)> {
    let domains =
        DOMAINS.get_or_init(|| LandlockDomains::load().map_err(|error| error.to_string()));
    let unknown_domain =
        |error: &str| format!("cannot check whether the process is in a Landlock domain: {error}");
    pids.iter().find_map(|pid| {
        let why = match domains {
            Err(error) => unknown_domain(error),
            Ok(domains) => match domains.is_confined(*pid) {
                Ok(false) => return None,
                Ok(true) => {
                    "the process is in a Landlock domain, which would be lost: run it without Landlock".into()
                }
                Err(error) => unknown_domain(&error.to_string()),
            },
        };
        Some((*pid, why))
    })
}
