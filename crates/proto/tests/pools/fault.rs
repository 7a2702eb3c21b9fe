//! Deliberate faults, which the oracles must find.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Users send no cookies.
    NoEcho,
    /// Users keep only their first cookie.
    OldCookie,
    /// Elements' timers do not fire.
    ElementSleeps,
    /// Users' timers do not fire.
    UserSleeps,
    /// Users do not notice lost links.
    UserDeaf,
    /// Elements do not receive registrars' keep-alives.
    ElementDeaf,
}

pub const ALL: [Fault; 6] = [
    Fault::NoEcho,
    Fault::OldCookie,
    Fault::ElementSleeps,
    Fault::UserSleeps,
    Fault::UserDeaf,
    Fault::ElementDeaf,
];
