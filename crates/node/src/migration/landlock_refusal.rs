//! Refusal to move processes in Landlock domains, whose restrictions cannot be restored at another node.

use std::sync::OnceLock;

use holdfast_bpf::landlock::LandlockDomains;
use holdfast_wire::failure::{Context, Failure, ProgramFault};

use crate::failure_conversion::IntoFailure;

/// Loaded once, because kernel support does not change while the kernel runs.
static DOMAINS: OnceLock<Result<LandlockDomains, Failure>> = OnceLock::new();

/// Returns the first of these processes that is in a domain, with the reason for a refusal. A process that has ended
/// counts as being in none.
pub(super) fn find_in_domain(pids: &[i32]) -> Option<(i32, Failure)> {
    let domains =
        DOMAINS.get_or_init(|| LandlockDomains::load().map_err(IntoFailure::into_failure));
    let unknown_domain = |failure: Failure| failure.within(Context::LandlockUnknown);
    pids.iter().find_map(|pid| {
        let why = match domains {
            Err(failure) => unknown_domain(failure.clone()),
            Ok(domains) => match domains.is_confined(*pid) {
                Ok(false) => return None,
                Ok(true) => ProgramFault::LandlockDomain.into(),
                Err(error) => unknown_domain(error.into_failure()),
            },
        };
        Some((*pid, why))
    })
}
