//! Deliberate faults, which the oracles must find.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Users send no cookies.
    NoCookieEcho,
    /// Users keep only their first cookie.
    FirstCookieOnly,
    /// Elements' timers do not fire.
    ElementTimersStuck,
    /// Users' timers do not fire.
    UserTimersStuck,
    /// Users do not notice lost links.
    UserMissesLinkLoss,
    /// Elements do not receive registrars' keep-alives.
    ElementMissesKeepAlives,
}

pub const ALL_FAULTS: [Fault; 6] = [
    Fault::NoCookieEcho,
    Fault::FirstCookieOnly,
    Fault::ElementTimersStuck,
    Fault::UserTimersStuck,
    Fault::UserMissesLinkLoss,
    Fault::ElementMissesKeepAlives,
];
