//! Length of each function, from its signature to its closing brace.

use proc_macro2::{Span, TokenTree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use super::rust_file::{RustFile, is_block, is_ident, is_punct, walk_tokens};

/// A function and its size.
#[derive(Debug, PartialEq, Eq)]
pub struct FunctionSize {
    /// Name with the type and modules around it inside its file: `tests::Machine::step`.
    pub name: String,
    /// First line.
    pub line: usize,
    /// Lines from the signature to the closing brace.
    pub lines: usize,
}

/// Returns the functions of a Rust file, including functions inside a macro's braces.
pub fn rust_functions(source: &RustFile) -> Vec<FunctionSize> {
    let mut visitor = FunctionVisitor::default();
    visitor.visit_file(&source.file);
    visitor.found
}

#[derive(Default)]
struct FunctionVisitor {
    scope: Vec<String>,
    found: Vec<FunctionSize>,
}

impl FunctionVisitor {
    fn add(&mut self, name: &str, start: Span, end: Span) {
        let name = self
            .scope
            .iter()
            .map(String::as_str)
            .chain([name])
            .collect::<Vec<_>>()
            .join("::");
        let line = start.start().line;
        self.found.push(FunctionSize {
            name,
            line,
            lines: end.end().line + 1 - line,
        });
    }

    fn in_scope(&mut self, scope: String, visit: impl FnOnce(&mut Self)) {
        self.scope.push(scope);
        visit(self);
        self.scope.pop();
    }
}

impl<'ast> Visit<'ast> for FunctionVisitor {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.add(
            &item.sig.ident.to_string(),
            item.sig.span(),
            item.block.span(),
        );
        self.in_scope(item.sig.ident.to_string(), |visitor| {
            visit::visit_item_fn(visitor, item)
        });
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.add(
            &item.sig.ident.to_string(),
            item.sig.span(),
            item.block.span(),
        );
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.add(&item.sig.ident.to_string(), item.sig.span(), block.span());
        }
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.in_scope(item.ident.to_string(), |visitor| {
            visit::visit_item_mod(visitor, item)
        });
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.in_scope(item.ident.to_string(), |visitor| {
            visit::visit_item_trait(visitor, item)
        });
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        self.in_scope(type_name(&item.self_ty), |visitor| {
            visit::visit_item_impl(visitor, item)
        });
    }

    /// `syn` leaves a macro's tokens unparsed, but `proptest! { fn ... }` contains functions nevertheless.
    fn visit_macro(&mut self, mac: &'ast syn::Macro) {
        walk_tokens(&mac.tokens, &mut |siblings, position| {
            if !is_ident(siblings.get(position), "fn") {
                return;
            }
            let Some(TokenTree::Ident(name)) = siblings.get(position + 1) else {
                return;
            };
            let rest = &siblings[position + 1..];
            let end = rest
                .iter()
                .find(|tree| is_block(Some(tree)) || is_punct(Some(tree), ';'));
            if let Some(TokenTree::Group(body)) = end {
                self.add(
                    &name.to_string(),
                    siblings[position].span(),
                    body.span_close(),
                );
            }
        });
    }
}

fn type_name(ty: &syn::Type) -> String {
    match ty {
        syn::Type::Path(path) => path
            .path
            .segments
            .last()
            .map(|last| last.ident.to_string())
            .unwrap_or_default(),
        syn::Type::Reference(reference) => type_name(&reference.elem),
        _ => "_".into(),
    }
}

/// Returns the functions of a C file with definitions that start, and end with `}`, in the first column.
pub fn c_functions(text: &str) -> Vec<FunctionSize> {
    let mut found = Vec::new();
    let mut signature: Option<(usize, String)> = None;
    let mut open_function: Option<(usize, String)> = None;
    for (index, line) in text.lines().enumerate() {
        if let Some((start, name)) = open_function.take() {
            if line.starts_with('}') {
                found.push(FunctionSize {
                    name,
                    line: start,
                    lines: index + 2 - start,
                });
            } else {
                open_function = Some((start, name));
            }
            continue;
        }
        if line.starts_with(['#', '/', '}', ' ', '\t']) && signature.is_none()
            || line.trim().is_empty()
        {
            signature = None;
            continue;
        }
        let (start, mut head) = signature.take().unwrap_or((index + 1, String::new()));
        head.push_str(line.trim());
        head.push(' ');
        if let Some(signature_text) = head.trim_end().strip_suffix('{') {
            open_function = c_function_name(signature_text).map(|name| (start, name));
        } else if !line.trim_end().ends_with(';') {
            signature = Some((start, head));
        }
    }
    found
}

/// Returns the name before the parameters; `None` for a structure, an initialiser or a list of constants.
fn c_function_name(signature: &str) -> Option<String> {
    if signature.contains('=') || !signature.trim_end().ends_with(')') {
        return None;
    }
    let mut depth = 0;
    let open = signature.char_indices().rev().find(|(_, character)| {
        depth += match character {
            ')' => 1,
            '(' => -1,
            _ => 0,
        };
        depth == 0 && *character == '('
    })?;
    let before = signature[..open.0].trim_end();
    let start = before
        .rfind(|character: char| !character.is_alphanumeric() && character != '_')
        .map_or(0, |at| at + 1);
    Some(before[start..].to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::rust_file::parse;
    use super::super::test_tree::tree;
    use super::*;

    fn sizes(functions: Vec<FunctionSize>) -> Vec<(String, usize, usize)> {
        functions
            .into_iter()
            .map(|function| (function.name, function.line, function.lines))
            .collect()
    }

    fn rust_sizes(text: &str) -> Vec<(String, usize, usize)> {
        let tree = tree(&[("a.rs", text)]);
        sizes(rust_functions(&parse(&tree).0[0]))
    }

    #[test]
    fn function_size_spans_signature_to_brace() {
        let text = "/// Docs.\n#[inline]\nfn a(\n    x: u8,\n) {\n    x;\n}\n";
        assert_eq!(rust_sizes(text), [("a".into(), 3, 5)]);
    }

    #[test]
    fn method_names_include_type_and_module() {
        let text =
            "mod m {\nimpl<T> Foo for &Bar<T> {\nfn b() {}\n}\ntrait T { fn c(); fn d() {\n} }\n}";
        assert_eq!(
            rust_sizes(text),
            [("m::Bar::b".into(), 3, 1), ("m::T::d".into(), 5, 2)]
        );
    }

    #[test]
    fn braces_in_strings_and_comments_do_not_count() {
        let text = "fn a() {\n    // }\n    let _ = \"}\";\n    let _ = '}';\n}\nfn b() {}\n";
        assert_eq!(rust_sizes(text), [("a".into(), 1, 5), ("b".into(), 6, 1)]);
    }

    #[test]
    fn functions_in_macros_are_found() {
        let text = "proptest! {\n#[test]\nfn p(x in 0..3) {\nx;\n}\n}\n";
        assert_eq!(rust_sizes(text), [("p".into(), 3, 3)]);
    }

    #[test]
    fn c_functions_are_measured_without_structures() {
        let text = "struct s {\n\tint a;\n};\n\nSEC(\"classifier\")\nint f(struct s *x)\n{\n\tif (x) {\n\t}\n\treturn 0;\n}\n\
                    static int g(int a,\n\t\tint b) {\n}\nint table[] = {\n1,\n};\n";
        assert_eq!(
            sizes(c_functions(text)),
            [("f".into(), 5, 7), ("g".into(), 12, 3)]
        );
    }
}
