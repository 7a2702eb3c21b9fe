//! Rust files, parsed once for all checks.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::Finding;
use crate::source_tree::SourceTree;

/// A Rust file in the forms that the checks need.
pub struct RustFile<'a> {
    pub path: &'a str,
    pub text: &'a str,
    /// All tokens, including tokens inside macros, which `file` leaves unparsed.
    pub tokens: TokenStream,
    pub file: syn::File,
}

/// Parses every `.rs` file; a file that cannot be parsed is a finding.
pub fn parse(tree: &SourceTree) -> (Vec<RustFile<'_>>, Vec<Finding>) {
    let mut sources = Vec::new();
    let mut findings = Vec::new();
    for (path, text) in tree.texts(|path| path.ends_with(".rs")) {
        let parsed = text.parse::<TokenStream>().map_err(syn::Error::from);
        match parsed.and_then(|tokens| Ok((tokens, syn::parse_file(text)?))) {
            Ok((tokens, file)) => sources.push(RustFile {
                path,
                text,
                tokens,
                file,
            }),
            Err(error) => findings.push(Finding::new(
                path,
                error.span().start().line,
                format!("not Rust: {error}"),
            )),
        }
    }
    (sources, findings)
}

/// Returns the line on which a token starts.
pub fn start_line(tree: &TokenTree) -> usize {
    match tree {
        TokenTree::Group(group) => group.span_open().start().line,
        other => other.span().start().line,
    }
}

/// Returns true if the token is this identifier or keyword.
pub fn is_ident(tree: Option<&TokenTree>, name: &str) -> bool {
    matches!(tree, Some(TokenTree::Ident(ident)) if ident == name)
}

/// Returns true if the token is this punctuation mark.
pub fn is_punct(tree: Option<&TokenTree>, mark: char) -> bool {
    matches!(tree, Some(TokenTree::Punct(punct)) if punct.as_char() == mark)
}

/// Returns true if the token is a group in braces.
pub fn is_block(tree: Option<&TokenTree>) -> bool {
    matches!(tree, Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace)
}

/// Calls `visit` with each list of sibling tokens and each position in it, at every depth.
pub fn walk_tokens(tokens: &TokenStream, visit: &mut impl FnMut(&[TokenTree], usize)) {
    let siblings: Vec<TokenTree> = tokens.clone().into_iter().collect();
    for (position, tree) in siblings.iter().enumerate() {
        visit(&siblings, position);
        if let TokenTree::Group(group) = tree {
            walk_tokens(&group.stream(), visit);
        }
    }
}
