//! Pure: `#if` and `#unless` that do not take an unknown variable for "no".

use handlebars::{
    Context, Handlebars, Helper, HelperDef, HelperResult, JsonTruthy, Output, RenderContext, RenderError,
    RenderErrorReason, Renderable,
};

/// Handlebars' own `if` is not strict in strict mode (its `each`, `with` and `lookup` are): in
/// `{{#if vars.debgu}}` the mistake would silently choose the other branch.
struct StrictIf {
    name: &'static str,
    wanted: bool,
}

/// Puts the strict helpers in place of the built-in ones.
pub(super) fn register(engine: &mut Handlebars<'_>) {
    for (name, wanted) in [("if", true), ("unless", false)] {
        engine.register_helper(name, Box::new(StrictIf { name, wanted }));
    }
}

impl HelperDef for StrictIf {
    fn call<'reg: 'rc, 'rc>(
        &self,
        helper: &Helper<'rc>,
        engine: &'reg Handlebars<'reg>,
        context: &'rc Context,
        render: &mut RenderContext<'reg, 'rc>,
        out: &mut dyn Output,
    ) -> HelperResult {
        let param = helper.param(0).ok_or(RenderErrorReason::ParamNotFoundForIndex(self.name, 0))?;
        if param.is_value_missing() {
            return Err(RenderError::strict_error(param.relative_path()));
        }
        let branch =
            if param.value().is_truthy(false) == self.wanted { helper.template() } else { helper.inverse() };
        branch.map_or(Ok(()), |branch| branch.render(engine, context, render, out))
    }
}
