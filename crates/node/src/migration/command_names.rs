//! Names and tokens of commands and results.

use holdfast_proto::migration::{Command, CommandToken, Results};

/// Returns the token of a command.
pub(crate) fn token_of(command: &Command) -> CommandToken {
    match command {
        Command::Check { token, .. }
        | Command::CopyRound { token, .. }
        | Command::SaveFlows { token, .. }
        | Command::Freeze { token, .. }
        | Command::Thaw { token, .. }
        | Command::Release { token, .. }
        | Command::Examine { token, .. }
        | Command::Build { token, .. }
        | Command::Arm { token, .. }
        | Command::Restore { token, .. }
        | Command::Resume { token, .. }
        | Command::Discard { token, .. }
        | Command::Forget { token, .. }
        | Command::Translate { token, .. }
        | Command::Arbitrate { token, .. }
        | Command::Lookup { token, .. } => *token,
    }
}

/// Returns a command's name in the fault file.
pub(crate) fn name_of_command(command: &Command) -> &'static str {
    match command {
        Command::Check { .. } => "move-check",
        Command::CopyRound { .. } => "move-round",
        Command::SaveFlows { .. } => "move-note",
        Command::Freeze { .. } => "move-freeze",
        Command::Thaw { .. } => "move-thaw",
        Command::Release { .. } => "move-release",
        Command::Examine { .. } => "move-examine",
        Command::Build { .. } => "move-build",
        Command::Arm { .. } => "move-arm",
        Command::Restore { .. } => "move-restore",
        Command::Resume { .. } => "move-go",
        Command::Discard { .. } => "move-discard",
        Command::Forget { .. } => "move-forget",
        Command::Translate { .. } => "move-translate",
        Command::Arbitrate { .. } => "move-arbitrate",
        Command::Lookup { .. } => "move-lookup",
    }
}

/// Returns the name of the command that has these results.
pub(crate) fn name_of_results(results: &Results) -> &'static str {
    match results {
        Results::Checked(_) => "move-check",
        Results::Copied(_) => "move-round",
        Results::FlowsSaved(_) => "move-note",
        Results::Frozen(_) => "move-freeze",
        Results::Thawed(_) => "move-thaw",
        Results::Released(_) => "move-release",
        Results::Examined(_) => "move-examine",
        Results::Built(_) => "move-build",
        Results::Armed(_) => "move-arm",
        Results::Restored(_) => "move-restore",
        Results::Resumed(_) => "move-go",
        Results::Discarded => "move-discard",
        Results::Forgotten => "move-forget",
        Results::Translated(_) => "move-translate",
        Results::Arbitrated(_) => "move-arbitrate",
        Results::LookedUp(_) => "move-lookup",
    }
}
